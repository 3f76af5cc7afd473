"""``duograph bench startup``: what the seconds from the command to a ready server are spent on.

Starts the real process tree twice: first with an empty cache folder (everything is compiled), then
with the one that the first start has filled. The engine times its own stages, which leave no gap;
the supervisor's part and the first request are taken from the log's time stamps. What none of them
explains is printed as a row of its own. The file system's cache is not emptied: a machine's very
first start also reads its libraries from disk. Flags after ``--`` go to ``duograph serve``.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from duograph.scheduler.exit_codes import ExitCode
from duograph.server.artifact_cache import FOLDER
from duograph.server.bench.bench_model import BenchModelError, prepare_folder
from duograph.server.bench.server_tree import ServerTree, ServerTreeError

SUPERVISOR, FIRST_REQUEST = "supervisor", "first_request"
REST = "unexplained"
MEANING = {
    SUPERVISOR: "the command's own imports, the model's config, the port",
    "process": "the engine's interpreter and import torch",
    "imports": "import of the model, the graph runners and torch's tracer",
    "device": "the CUDA context",
    "weights": "making the model, reading or drawing its weights",
    "attention_kernels": "attention kernels that a library compiles before the first step",
    "tables": "tables of requests, buffers, rotary table",
    "first_steps": "the largest eager steps; kernels are compiled or loaded in them",
    "trace": "torch.compile traces the model and cuts it",
    "measure_graphs": "captures that are measured and thrown away; the size of the KV pool",
    "kv_pool": "allocating the KV pool",
    "capture_prefill": "capturing every prefill level",
    "capture_decode": "capturing every decode size",
    "warm_up": "two short generations inside the engine",
    FIRST_REQUEST: "the first request over HTTP",
    REST: "the whole less all above",
}


@dataclass(frozen=True, kw_only=True)
class Start:
    """One start of the tree.

    Attributes:
        seconds: by stage, in order; they add up to ``total``.
        total: seconds from the command to the line that says ready.
        decode_sizes, prefill_levels: how many graphs were captured.
        compiles: what Triton compiled and what it found in the cache.
        cache_files: files of compiled code after the start.
    """

    cache: str
    seconds: dict[str, float]
    total: float
    decode_sizes: int
    prefill_levels: int
    compiles: dict[str, float]
    cache_files: int


def main(arguments: list[str]) -> int:
    options = _parser().parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="duograph-startup-") as name:
        try:
            starts = measure_starts(options, Path(name))
        except (BenchModelError, ServerTreeError, OSError, ValueError) as error:
            print(f"duograph bench startup: error: {error}", file=sys.stderr)
            return ExitCode.INTERNAL
    print(table(starts))
    if options.json:
        report = {"model_path": options.model_path, "starts": [asdict(start) for start in starts]}
        Path(options.json).write_text(json.dumps(report, indent=1) + "\n")
    return ExitCode.OK


def measure_starts(options: argparse.Namespace, scratch: Path) -> list[Start]:
    """The cold start, then the warm one, over one cache folder below ``scratch``.

    Raises:
        BenchModelError, ServerTreeError: the model's folder or the server is at fault.
    """
    folder = prepare_folder(Path(options.model_path), scratch)
    flags = [str(folder), "--load-format", options.load_format, "--port", "0"]
    flags += [*options.serve_flags, "--log-format", "json", "--log-level", "info"]
    cache_home = scratch / "cache"
    cache_home.mkdir()
    starts = []
    for cache in ("cold", "warm")[: options.starts]:
        log = Path(options.log_folder or scratch) / f"{cache}.log"
        starts.append(measure(flags, cache, cache_home, log))
        print(f"{cache} cache: ready after {starts[-1].total:.1f} s", flush=True)
    return starts


def measure(flags: Sequence[str], cache: str, cache_home: Path, log: Path) -> Start:
    """Starts a tree, reads its figures and ends it.

    Args:
        flags: of ``duograph serve``, with ``--log-format json``.
        cache: the word for this start.
        cache_home: stands for the user's cache folder.
        log: file that gets what the server says.

    Raises:
        ServerTreeError: the server did not become ready.
    """
    environ = {**os.environ, "XDG_CACHE_HOME": str(cache_home)}
    began = time.time()
    with ServerTree(flags, log, environ=environ) as tree:
        with urllib.request.urlopen(f"{tree.url}/graphs", timeout=30) as answer:
            captured = json.load(answer)
    moments = log_moments(log.read_text(errors="replace").splitlines())
    return explain(captured, moments, began, cache=cache, cache_files=count_files(cache_home))


def log_moments(lines: Sequence[str]) -> dict[str, float]:
    """Seconds since 1970 at which the log says that the tree listens, that the engine is ready and
    that the server is. Raises ValueError if a line is missing."""
    words = {"Listening on ": "listening", "Engine ready": "engine", "The server is fired": "ready"}
    found: dict[str, float] = {}
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:
            continue  # a library that prints
        for start, name in words.items():
            if isinstance(record, dict) and str(record.get("message", "")).startswith(start):
                found.setdefault(name, float(record["time"]))
    missing = set(words.values()) - found.keys()
    if missing:
        raise ValueError(f"the server's log does not say when it was {', '.join(sorted(missing))}")
    return found


def explain(
    captured: Mapping[str, Any],
    moments: Mapping[str, float],
    began: float,
    *,
    cache: str,
    cache_files: int,
) -> Start:
    """Puts the engine's own figures between those of the log.

    Args:
        captured: the engine's part of ``GET /graphs``.
        moments: of ``log_moments``; ``began`` is on the same clock.
    """
    total = moments["ready"] - began
    seconds = {SUPERVISOR: moments["listening"] - began}
    seconds |= captured["start_seconds"]
    seconds[FIRST_REQUEST] = moments["ready"] - moments["engine"]
    seconds[REST] = total - sum(seconds.values())
    return Start(
        cache=cache,
        seconds=seconds,
        total=total,
        decode_sizes=len(captured["decode"]["sizes"]),
        prefill_levels=len(captured["prefill"]["sizes"]),
        compiles=captured["compiles"],
        cache_files=cache_files,
    )


def count_files(cache_home: Path) -> int:
    """Files of compiled code below a cache folder."""
    folder = cache_home / "duograph" / FOLDER
    return sum(path.is_file() for path in folder.rglob("*"))


def table(starts: Sequence[Start]) -> str:
    """One row per stage, one column per start."""
    stages = list(dict.fromkeys(stage for start in starts for stage in start.seconds))
    stages = [stage for stage in stages if stage not in (FIRST_REQUEST, REST)]
    rows = [f"{'seconds':16} | " + " | ".join(f"{start.cache:>6}" for start in starts)]
    for stage in (*stages, FIRST_REQUEST, REST):
        values = " | ".join(f"{start.seconds.get(stage, 0.0):6.2f}" for start in starts)
        rows.append(f"{stage:16} | {values} | {MEANING.get(stage, '')}")
    rows.append(f"{'ready':16} | " + " | ".join(f"{start.total:6.2f}" for start in starts))
    for start in starts:
        rows.append(
            f"{start.cache}: {start.decode_sizes} decode sizes and {start.prefill_levels} prefill "
            f"levels; {start.compiles['triton_compiled']:g} Triton kernels compiled in "
            f"{start.compiles['triton_compile_seconds']:.1f} s, "
            f"{start.compiles['triton_cached']:g} from the cache; {start.cache_files} cache files"
        )
    return "\n".join(rows)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="duograph bench startup", description=__doc__)
    parser.add_argument("--model-path", required=True, help="folder with at least a config.json")
    parser.add_argument("--load-format", default="dummy", choices=("auto", "dummy"))
    parser.add_argument(
        "--starts", type=int, default=2, choices=(1, 2), help="1 leaves out the warm one"
    )
    parser.add_argument("--json", help="file that gets all figures")
    parser.add_argument("--log-folder", help="folder that keeps the servers' logs")
    parser.add_argument("serve_flags", nargs="*", metavar="-- SERVE FLAGS")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
