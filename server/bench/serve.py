"""``duograph bench serve``: tokens/s and latencies over HTTP, the whole process tree at work.

Starts ``duograph serve`` (or takes a running server, ``--url``) and sends it completions of
random token ids from processes of its own, closed loop: each stream sends its next request when
the last one has ended. One row per number of streams; a request that fails is counted and named,
and makes the exit code 1. A folder with only a config.json is served with dummy weights and a
made-up tokenizer, so that frontends turn every token into text. Flags after ``--`` go to serve.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from duograph.scheduler.exit_codes import ExitCode
from duograph.server.bench.bench_model import BenchModelError, prepare_folder
from duograph.server.bench.http_load import LoadConfig, LoadResult
from duograph.server.bench.server_tree import ServerTree, ServerTreeError

CONCURRENCY = (1, 16, 64, 256)
REQUEST_TIMEOUT_S = 300.0
ANSWER_TIMEOUT_S = 1800.0  # of one row
METRICS_DELAY_S = 0.7  # the scheduler tells its figures every half second
MAX_CLIENT_PROCESSES = 8  # as many as the peers were measured with


@dataclass(frozen=True, kw_only=True)
class ServeRow:
    """One number of streams. Times are milliseconds; ITL is between arrivals of a stream's
    pieces, which hold several tokens where the server or the client fell behind."""

    concurrency: int
    requests: int  # answered in full
    errors: dict[str, int]
    seconds: float  # from the first request to the last byte
    tokens_per_s: float
    requests_per_s: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    engine_ttft_mean_ms: float  # of it, between arrival at the scheduler and the token there
    itl_p50_ms: float
    itl_p99_ms: float
    itl_max_ms: float
    tpot_mean_ms: float  # (last piece - first) / (tokens - 1)
    tokens_per_piece: float
    cpu_shares: dict[str, float]  # of one core, by process of the server; {} for --url
    client_cpu_share: float  # of the busiest client process


class BenchServeError(RuntimeError):
    """The measurement could not be made; one sentence."""


def main(arguments: list[str]) -> int:
    options = _parser().parse_args(arguments)
    try:
        with tempfile.TemporaryDirectory(prefix="dg-bench-") as scratch:
            rows = _run(options, Path(scratch))
    except (BenchServeError, BenchModelError, ServerTreeError) as error:
        print(f"duograph bench serve: error: {error}", file=sys.stderr)
        return ExitCode.INTERNAL
    if options.json is not None:
        options.json.write_text(json.dumps({"workload": _workload(options), "rows": rows}))
    return ExitCode.INTERNAL if any(row["errors"] for row in rows) else ExitCode.OK


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="duograph bench serve", description=__doc__)
    parser.add_argument("--model-path", default="", help="model folder; empty = the default model")
    parser.add_argument("--url", help="measure the server that runs there instead of a new one")
    parser.add_argument("--concurrency", type=int, nargs="+", default=CONCURRENCY)
    parser.add_argument("--requests-per-stream", type=int, default=8)
    parser.add_argument("--input-len", type=int, default=512, help="tokens")
    parser.add_argument("--output-len", type=int, default=128, help="tokens")
    parser.add_argument("--client-processes", type=int, default=MAX_CLIENT_PROCESSES)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the rows there, too")
    parser.add_argument("serve_flags", nargs="*", metavar="-- SERVE FLAGS")
    return parser


def _workload(options: argparse.Namespace) -> dict[str, object]:
    names = ("model_path", "input_len", "output_len", "requests_per_stream", "seed", "serve_flags")
    return {name: getattr(options, name) for name in names}


def _run(options: argparse.Namespace, scratch: Path) -> list[dict[str, object]]:
    if options.url is not None:
        target = _Target(options.url, None, _vocab_size(options.url), scratch)
        return _measure_all(options, target)
    flags = ["--port", "0", "--disable-radix-cache"]
    if options.model_path:
        given = Path(options.model_path)
        folder = prepare_folder(given, scratch) if given.is_dir() else given
        flags += ["--model-path", str(folder)]
        if given.is_dir() and not any(given.glob("*.safetensors")):
            flags += ["--load-format", "dummy"]
    with ServerTree([*flags, *options.serve_flags], scratch / "server.log") as server:
        print(f"ready after {server.ready_s:.1f} s; processes: {', '.join(server.names())}")
        print(server.line_with("Engine started in"))
        target = _Target(server.url, server, _vocab_size(server.url), scratch)
        return _measure_all(options, target)


@dataclass(frozen=True)
class _Target:
    """What is measured."""

    url: str
    server: ServerTree | None  # None if somebody else has started it
    vocab_size: int
    scratch: Path


def _measure_all(options: argparse.Namespace, target: _Target) -> list[dict[str, object]]:
    _measure(options, target, concurrency=16, requests=16)  # warms up
    print(
        f"{options.input_len} tokens in, {options.output_len} out, greedy, "
        f"{options.requests_per_stream} requests a stream, closed loop"
    )
    print(_TABLE_HEAD, flush=True)
    rows = []
    for concurrency in options.concurrency:
        requests = concurrency * options.requests_per_stream
        row = _measure(options, target, concurrency=concurrency, requests=requests)
        if target.server is not None:
            target.server.check_alive()
        _print_row(row)
        rows.append(asdict(row))
    return rows


def _vocab_size(url: str) -> int:
    info = json.loads(_get(url, "/server_info"))
    if "vocab_size" not in info:
        raise BenchServeError(f"{url}/server_info does not tell the vocabulary's size")
    return int(info["vocab_size"])


def _get(url: str, path: str) -> bytes:
    try:
        with urllib.request.urlopen(url.rstrip("/") + path, timeout=30) as response:
            body: bytes = response.read()
            return body
    except OSError as error:  # also what urllib raises for an error status
        raise BenchServeError(f"{url}{path} cannot be read: {error}") from error


def _measure(
    options: argparse.Namespace, target: _Target, *, concurrency: int, requests: int
) -> ServeRow:
    address, server = urlsplit(target.url), target.server
    count = max(1, min(options.client_processes, concurrency, len(os.sched_getaffinity(0)) // 2))
    configs = [
        LoadConfig(
            host=address.hostname or "127.0.0.1",
            port=address.port or 80,
            streams=_share(concurrency, count, number),
            requests=_share(requests, count, number),
            input_len=options.input_len,
            output_len=options.output_len,
            vocab_size=target.vocab_size,
            seed=options.seed * 1_000_000 + concurrency * 1_000 + number,
            timeout_s=REQUEST_TIMEOUT_S,
            result_path=str(target.scratch / f"result-{number}"),
        )
        for number in range(count)
    ]
    clients = _Clients(configs)
    try:
        clients.wait_until_ready()
        engine = _engine_ttft(target.url)
        before = server.cpu_seconds() if server is not None else {}
        results = clients.go()
        after = server.cpu_seconds() if server is not None else {}
    finally:
        clients.kill()
    used = {name: after[name] - before[name] for name in before if name in after}
    row = _row(concurrency, options.output_len, results, used)
    return replace(row, engine_ttft_mean_ms=_engine_ttft(target.url).mean_ms_since(engine))


@dataclass(frozen=True)
class _EngineTtft:
    """The scheduler's own figure: from a request's arrival there to its first token."""

    seconds: float
    count: float

    def mean_ms_since(self, before: _EngineTtft) -> float:
        return (self.seconds - before.seconds) / max(1.0, self.count - before.count) * 1e3


def _engine_ttft(url: str) -> _EngineTtft:
    time.sleep(METRICS_DELAY_S)
    page = _get(url, "/metrics").decode()
    found = dict(
        re.findall(r"^sglang:time_to_first_token_seconds_(sum|count){[^}]*} (\S+)$", page, re.M)
    )
    if found.keys() != {"sum", "count"}:
        raise BenchServeError(f"{url}/metrics does not tell the time to the first token")
    return _EngineTtft(float(found["sum"]), float(found["count"]))


def _share(total: int, parts: int, number: int) -> int:
    return total // parts + (number < total % parts)


class _Clients:
    """The processes of http_load.py."""

    def __init__(self, configs: Sequence[LoadConfig]) -> None:
        self._configs = configs
        command = [sys.executable, "-m", "duograph.server.bench.http_load"]
        self._children = [
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            for _ in configs
        ]
        for child, config in zip(self._children, configs, strict=True):
            assert child.stdin is not None
            child.stdin.write(msgspec.json.encode(config) + b"\n")
            child.stdin.flush()

    def wait_until_ready(self) -> None:
        for child in self._children:
            assert child.stdout is not None
            if child.stdout.readline() != b"ready\n":
                raise BenchServeError("a client could not connect to the server")

    def go(self) -> list[LoadResult]:
        for child in self._children:
            assert child.stdin is not None
            child.stdin.write(b"go\n")
            child.stdin.flush()
        results = []
        for child, config in zip(self._children, self._configs, strict=True):
            if code := child.wait(ANSWER_TIMEOUT_S):
                raise BenchServeError(f"a client process ended with code {code}")
            result = Path(config.result_path).read_bytes()
            results.append(msgspec.msgpack.decode(result, type=LoadResult))
        return results

    def kill(self) -> None:
        for child in self._children:
            child.kill()
            child.communicate()


def _row(
    concurrency: int, output_len: int, results: Sequence[LoadResult], used: dict[str, float]
) -> ServeRow:
    records = [record for result in results for record in result.records]
    errors: Counter[str] = Counter()
    for result in results:
        errors.update(result.failures)
    if not records:
        raise BenchServeError(f"no request of {concurrency} streams was answered: {dict(errors)}")
    seconds = max(r.last for r in records) - min(r.sent for r in records)
    tokens = len(records) * output_len
    ttft = [record.first - record.sent for record in records]
    gaps = [gap for record in records for gap in record.gaps]
    tpot = [(r.last - r.first) / max(1, output_len - 1) for r in records]
    return ServeRow(
        concurrency=concurrency,
        requests=len(records),
        errors=dict(errors),
        seconds=seconds,
        tokens_per_s=tokens / seconds,
        requests_per_s=len(records) / seconds,
        ttft_p50_ms=_percentile_ms(ttft, 0.5),
        ttft_p99_ms=_percentile_ms(ttft, 0.99),
        engine_ttft_mean_ms=0.0,
        itl_p50_ms=_percentile_ms(gaps, 0.5),
        itl_p99_ms=_percentile_ms(gaps, 0.99),
        itl_max_ms=_percentile_ms(gaps, 1.0),
        tpot_mean_ms=sum(tpot) / len(tpot) * 1e3,
        tokens_per_piece=tokens / max(1, sum(record.pieces for record in records)),
        cpu_shares={name: cpu / seconds for name, cpu in used.items()},
        client_cpu_share=max(result.cpu_s for result in results) / seconds,
    )


def _percentile_ms(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] * 1e3 if ordered else 0.0


_TABLE_HEAD = (
    "streams requests errors  tokens/s  TTFT p50     p99  engine   ITL p50     p99     max  "
    "tokens/piece  share of a core"
)


def _print_row(row: ServeRow) -> None:
    shares = ", ".join(f"{name} {100 * share:.0f}%" for name, share in row.cpu_shares.items())
    print(
        f"{row.concurrency:7} {row.requests:8} {sum(row.errors.values()):6} "
        f"{row.tokens_per_s:9.0f} {row.ttft_p50_ms:9.1f} {row.ttft_p99_ms:7.1f} "
        f"{row.engine_ttft_mean_ms:7.1f} "
        f"{row.itl_p50_ms:9.2f} {row.itl_p99_ms:7.2f} {row.itl_max_ms:7.1f} "
        f"{row.tokens_per_piece:13.2f}  {shares or 'unknown'}, "
        f"client {100 * row.client_cpu_share:.0f}%",
        flush=True,
    )
    for problem, count in row.errors.items():
        print(f"        {count} x {problem}", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
