"""What graph mode costs and saves: seconds to trace and capture, and CPU time of a step by replay
and eagerly, taken in turns.

    OMP_NUM_THREADS=1 PYTHONPATH=.src python tests/benchmarks/bench_graphs.py MODEL_FOLDER

On the CPU the time is that of the process, so that other work on the machine does not count; on
CUDA it is wall-clock time until the device is done.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import torch

from duograph.runners.batch import ForwardMode, SamplingBatch
from duograph.runners.config import GraphConfig, RunnerConfig
from duograph.runners.memory_plan import dummy_batch
from duograph.runners.model_config import ModelConfig
from duograph.runners.models.loader import load_model
from duograph.runners.resolve import resolve_device
from duograph.runners.worker import ModelWorker

ROUNDS = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--tokens", type=int, nargs="+", default=[16, 64, 256, 512])
    parser.add_argument("--compiler", default="auto", help="of the pieces")
    parser.add_argument("--enable-torch-compile", action="store_true")
    options = parser.parse_args()
    started = time.perf_counter()
    worker = start(options)
    print(f"start without imports: {time.perf_counter() - started:.1f} s")
    stats = worker.graph_stats()
    print("stages:", {name: round(value, 2) for name, value in stats["start_seconds"].items()})
    for phase in ("prefill", "decode"):
        for size, one in stats[phase]["sizes"].items():
            print(f"{phase} {size}: {one['seconds']:.2f} s, {one['nbytes'] / 2**20:.1f} MiB")
    clock = time.process_time if worker.device.type == "cpu" else time.perf_counter
    print("step | replay ms | eager ms | eager / replay")
    for mode, sizes in (
        (ForwardMode.DECODE, options.batch_sizes),
        (ForwardMode.EXTEND, options.tokens),
    ):
        for size in sizes:
            compare(worker, mode, size, clock)


def start(options: argparse.Namespace) -> ModelWorker:
    graph = GraphConfig(
        piecewise_cuda_graph_compiler=options.compiler,
        enable_torch_compile=options.enable_torch_compile,
    )
    config = RunnerConfig(
        model_path=str(options.model), load_format=options.load_format, graph=graph
    )
    model_config = ModelConfig.from_folder(options.model)
    device = torch.device(resolve_device(options.device))
    worker = ModelWorker(config, model_config, load_model(config, model_config, device), device)
    worker.plan_memory()
    worker.build_runners()
    worker.capture(lambda phase, done, total: None)
    return worker


def compare(worker: ModelWorker, mode: ForwardMode, size: int, clock: Callable[[], float]) -> None:
    batch = dummy_batch(mode, size)
    batch.sampling = SamplingBatch()
    runners = worker._runners
    assert runners is not None
    graphs = runners.decode if mode is ForwardMode.DECODE else runners.prefill
    assert graphs is not None
    pick = runners.pick_runner
    best = {"replay": float("inf"), "eager": float("inf")}
    steps = 10 if mode is ForwardMode.DECODE else 3
    for _ in range(ROUNDS):
        for name, runner in (("replay", graphs), ("eager", runners.eager)):
            runners.pick_runner = lambda _, runner=runner: runner  # type: ignore[method-assign,misc]
            worker.launch(batch).wait()
            begin = clock()
            outputs = [worker.launch(batch) for _ in range(steps)]
            outputs[-1].wait()
            best[name] = min(best[name], (clock() - begin) / steps)
    runners.pick_runner = pick  # type: ignore[method-assign]
    replay, eager = best["replay"] * 1e3, best["eager"] * 1e3
    print(f"{mode.value} {size} | {replay:.2f} | {eager:.2f} | {eager / replay:.2f}")


if __name__ == "__main__":
    main()
