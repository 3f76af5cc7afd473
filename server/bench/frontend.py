"""What one frontend process costs: streams from a scripted engine, read by a cheap client.

``duograph bench frontend [--model PATH]`` starts one frontend on a core of its own, the engine and
the client on another, and prints a row per offered rate. Every text is checked.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import psutil

from duograph.server.bench.frontend_client import ClientConfig
from duograph.server.chat import ChatTemplate
from duograph.server.config import FrontendConfig, HttpConfig
from duograph.server.model_store import resolve_model
from duograph.server.scripted_engine import ScriptedEngineConfig
from duograph.server.tokenizer import Tokenizer

START_TIMEOUT_S = 60.0
RUN_TIMEOUT_S = 300.0
LOG_FILE = "frontend.log"
RATES = (12_000.0, 25_000.0, 50_000.0, 100_000.0)

_TABLE_HEAD = (
    "   offered  delivered    chunks  CPU us  of it  CPU TTFT p50    p99 /health p50    p99  wrong",
    "  tokens/s   tokens/s        /s  /token kernel          ms     ms          ms     ms  texts",
)

PROMPT = "Tell me about the sea, the größte of all, and 日本 too 🙂. It must be long."


@dataclass(frozen=True, kw_only=True)
class BenchFrontendConfig:
    """``rate`` is in tokens per second over all streams."""

    model_folder: str
    streams: int = 256
    tokens: int = 256  # per stream
    rate: float = 12_000.0
    observed: bool = True  # metrics counted and every request logged, as a server does


@dataclass(frozen=True, kw_only=True)
class BenchFrontendResult:
    """Times are in the unit that the name says; percentiles over streams or health checks."""

    rate: float
    tokens_per_s: float  # delivered, from the first token to the last
    chunks_per_s: float
    cpu_us_per_token: float  # of the frontend process, all its threads, requests included
    system_us_per_token: float  # the kernel's part of it: mostly sending
    cpu_share: float  # of one core, while tokens flowed
    ttft_p50_ms: float
    ttft_p99_ms: float
    health_p50_ms: float
    health_p99_ms: float
    wrong_texts: int


def bench_frontend(config: BenchFrontendConfig) -> BenchFrontendResult:
    """One run. Raises RuntimeError if the frontend does not start or an answer never ends."""
    cores = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory(prefix="dg-bench-") as run_dir:
        listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
        children: list[subprocess.Popen[bytes]] = []
        try:
            with listener:
                port = listener.getsockname()[1]
                children.append(_start_engine(config, run_dir, cores[-1]))
                children.append(_start_frontend(config, run_dir, listener, cores[0]))
            frontend = psutil.Process(children[1].pid)
            _wait_for_health(port, children[1], Path(run_dir, LOG_FILE))
            _wait_until_idle(frontend)
            return _measure(config, port, frontend, cores[-1])
        finally:
            for child in children:
                child.kill()
                child.wait()


def _start_engine(config: BenchFrontendConfig, run_dir: str, core: int) -> subprocess.Popen[bytes]:
    engine = ScriptedEngineConfig(
        run_dir=run_dir,
        vocab_size=1 << 20,
        max_running_requests=config.streams,
        step_s=config.streams / config.rate,
    )
    path = Path(run_dir, "engine.json")
    path.write_bytes(msgspec.json.encode(engine))
    command = ["-m", "duograph.server.scripted_engine", "--config", str(path)]
    return _on_core(core, command)


def _start_frontend(
    config: BenchFrontendConfig, run_dir: str, listener: socket.socket, core: int
) -> subprocess.Popen[bytes]:
    document = FrontendConfig(
        http=HttpConfig(log_level="info" if config.observed else "warning"),
        run_dir=run_dir,
        index=0,
        listen_fd=listener.fileno(),
        parent_pid=os.getpid(),
        model_folder=config.model_folder,
        served_names=("bench",),
    )
    config_fd = os.memfd_create("config")
    try:
        os.write(config_fd, msgspec.json.encode(document))
        os.lseek(config_fd, 0, os.SEEK_SET)
        module = "duograph.server.frontend"
        if not config.observed:
            module = "duograph.server.bench.blind_frontend"
        command = ["-m", module, "--config-fd", str(config_fd)]
        with open(Path(run_dir, LOG_FILE), "wb") as log:
            return _on_core(core, command, (config_fd, listener.fileno()), stderr=log)
    finally:
        os.close(config_fd)


def _on_core(
    core: int, arguments: Sequence[str], fds: Sequence[int] = (), **pipes: Any
) -> subprocess.Popen[bytes]:
    child = subprocess.Popen([sys.executable, *arguments], pass_fds=fds, **pipes)
    os.sched_setaffinity(child.pid, {core})
    return child


def _wait_for_health(port: int, frontend: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and frontend.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                return
        except OSError:
            time.sleep(0.05)
    last = log.read_text(errors="replace").strip().splitlines()[-1:]
    raise RuntimeError(f"the frontend did not become healthy: {' '.join(last) or 'no word'}")


def _wait_until_idle(frontend: psutil.Process) -> None:
    """Until it has made what it prepares in the background. A server has loaded its model by then;
    here the first requests would share a core with it."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        before = sum(frontend.cpu_times()[:2])
        time.sleep(0.5)
        if sum(frontend.cpu_times()[:2]) - before <= 0.02:  # its beat, and the clock's grain
            return
    raise RuntimeError("the frontend does not come to rest")


def _measure(
    config: BenchFrontendConfig, port: int, frontend: psutil.Process, core: int
) -> BenchFrontendResult:
    body = {
        "messages": [{"role": "user", "content": PROMPT}],
        "max_tokens": config.tokens,
        "ignore_eos": True,
        "stream": True,
    }
    text = json.dumps(body)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(text)}"
    request = f"{head}\r\nContent-Type: application/json\r\n\r\n{text}"
    client = _on_core(
        core,
        ["-m", "duograph.server.bench.frontend_client"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    told = ClientConfig(port=port, streams=config.streams, request=request)
    before = frontend.cpu_times()
    output, _ = client.communicate(msgspec.json.encode(told), timeout=RUN_TIMEOUT_S)
    after = frontend.cpu_times()
    if client.returncode != 0:
        raise RuntimeError("the client failed")
    seen = json.loads(output)
    expected = _expected_text(config)
    system_s = after.system - before.system
    cpu_s = after.user - before.user + system_s
    total = config.streams * config.tokens
    return BenchFrontendResult(
        rate=config.rate,
        tokens_per_s=total / seen["seconds"],
        chunks_per_s=sum(seen["chunks"]) / seen["seconds"],
        cpu_us_per_token=cpu_s / total * 1e6,
        system_us_per_token=system_s / total * 1e6,
        cpu_share=cpu_s / seen["seconds"],
        ttft_p50_ms=_percentile(seen["ttft"], 0.5) * 1e3,
        ttft_p99_ms=_percentile(seen["ttft"], 0.99) * 1e3,
        health_p50_ms=_percentile(seen["health"], 0.5) * 1e3,
        health_p99_ms=_percentile(seen["health"], 0.99) * 1e3,
        wrong_texts=sum(answer != expected for answer in seen["texts"]),
    )


def _expected_text(config: BenchFrontendConfig) -> str:
    """The scripted engine repeats the prompt's tokens."""
    folder = Path(config.model_folder)
    tokenizer = Tokenizer(folder)
    ids = asyncio.run(ChatTemplate(folder, tokenizer).encode([{"role": "user", "content": PROMPT}]))
    tokens = [ids[position % len(ids)] for position in range(config.tokens)]
    return tokenizer.decode(tokens, skip_special_tokens=True)


def _percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def _print_row(result: BenchFrontendResult) -> None:
    print(
        f"{result.rate:10.0f} {result.tokens_per_s:10.0f} {result.chunks_per_s:9.0f} "
        f"{result.cpu_us_per_token:7.1f} {result.system_us_per_token:6.1f} "
        f"{100 * result.cpu_share:3.0f}% {result.ttft_p50_ms:8.0f} {result.ttft_p99_ms:6.0f} "
        f"{result.health_p50_ms:11.1f} {result.health_p99_ms:6.1f} {result.wrong_texts:6d}",
        flush=True,
    )


def _print_cost(config: BenchFrontendConfig, rounds: int) -> None:
    """CPU time and not tokens/s: the offered rate bounds those, and a busy machine moves them."""
    with_s, without_s = [], []
    for _ in range(rounds):
        with_s.append(bench_frontend(config).cpu_us_per_token)
        without_s.append(bench_frontend(replace(config, observed=False)).cpu_us_per_token)
    seen, blind = statistics.median(with_s), statistics.median(without_s)
    print(
        f"CPU us a token, median of {rounds}: {seen:.2f} with metrics and log, {blind:.2f} without"
    )
    print(f"cost {100 * (seen / blind - 1):+.1f} %")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="duograph bench frontend", description=__doc__)
    parser.add_argument("--model", default="", help="model folder; empty = the default model")
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=256, help="per stream")
    parser.add_argument("--rates", type=float, nargs="+", default=RATES, help="tokens/s offered")
    parser.add_argument("--json", action="store_true", help="one JSON object a row")
    parser.add_argument(
        "--cost-of-metrics",
        type=int,
        metavar="ROUNDS",
        help="instead: CPU per token with metrics and access log against without, in turns",
    )
    options = parser.parse_args(arguments)
    folder = Path(options.model)
    if not options.model:
        folder = resolve_model("", "auto", os.environ, print).folder
    config = BenchFrontendConfig(
        model_folder=str(folder), streams=options.streams, tokens=options.tokens
    )
    if options.cost_of_metrics:
        _print_cost(replace(config, rate=options.rates[0]), options.cost_of_metrics)
        return 0
    if not options.json:
        print(f"one frontend process, {config.streams} streams of {config.tokens} tokens")
        for line in _TABLE_HEAD:
            print(line)
    for rate in options.rates:
        result = bench_frontend(replace(config, rate=rate))
        if options.json:
            print(json.dumps(asdict(result)), flush=True)
        else:
            _print_row(result)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
