"""``duograph bench graphs``: what each graph costs, saves and wastes. Engine in process.

For every captured size of both phases: one step by graph and eagerly (graphs on and off), with
Inductor's code in the graph for the sizes asked for, the work in the graph, seconds and bytes of
its capture, and what padding to it costs. A step is what the engine runs: inputs to the device, the
forward, sampling; steps are launched one behind the other, as the overlap loop does, and timed
until the device is done. Best of ``--rounds``, each of which goes through all sizes, so that a
moment in which the machine is slow spoils one round of a size and not all. Every row of a decode
step attends to ``--kv-tokens`` tokens. On the CPU a step's time is that of the process, so that
other work on the machine does not count. ``--from-json`` shows an earlier ``--json`` again, without
a model.
"""

from __future__ import annotations

import argparse
import gc
import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from duograph.runners.batch import ForwardBatch, ForwardMode, SamplingBatch, dummy_batch
from duograph.runners.cuda_graph_runner import CudaGraphRunner
from duograph.runners.graph import Graph
from duograph.runners.piecewise import TorchCompileCutter
from duograph.runners.piecewise_cuda_graph_runner import PiecewiseCudaGraphRunner
from duograph.runners.recorded_graph import RecordedGraph
from duograph.runners.runner_set import Runner
from duograph.runners.worker import ModelWorker
from duograph.scheduler.exit_codes import ExitCode
from duograph.scheduler.offline import OfflineEngine
from duograph.server.bench import graphs_report
from duograph.server.bench.graphs_plot import draw, require_matplotlib
from duograph.server.bench.graphs_report import PhaseFigures, Report, ReportError, SizeFigures
from duograph.server.bench.in_process import add_engine_flags, engine_config, use_artifact_cache
from duograph.server.options import UsageError

GraphRunner = CudaGraphRunner | PiecewiseCudaGraphRunner

KV_POOL_TOKENS = 1 << 16  # enough for a step of any size; a measured pool would take all memory
ROUND_SECONDS = 0.02
STEPS = (2, 40)  # of a round, at least and at most
MARK = "spin_kernel"  # what torch.cuda._sleep launches


def main(arguments: list[str]) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.from_json is None and options.model_path is None:
        parser.error("--model-path or --from-json is needed")
    if options.png is not None:
        require_matplotlib()
    try:
        report = measured(options) if options.from_json is None else read(options.from_json)
    except ReportError as error:
        raise UsageError(f"--from-json: {error}") from error
    print(graphs_report.table(report))
    if options.json is not None:
        graphs_report.save(report, Path(options.json))
    if options.png is not None:
        draw(report, Path(options.png))
    return ExitCode.OK


def read(path: str) -> Report:
    return graphs_report.load(Path(path))


def measured(options: argparse.Namespace) -> Report:
    """Starts an engine and measures it."""
    worker = create_worker(options)
    runners = worker.runners
    phases = []
    if runners.decode is not None:
        sizes = _to_compile(worker, options.compile_decode_sizes, runners.decode.sizes)
        compiled, seconds = _compiled_decode(worker, sizes) if sizes else (None, None)
        phases.append(measure_phase(worker, "decode", compiled, seconds, options))
    if runners.prefill is not None:
        levels = _to_compile(worker, options.compile_prefill_levels, runners.prefill.sizes)
        pieces, seconds = _compiled_prefill(worker, levels) if levels else (None, None)
        phases.append(measure_phase(worker, "prefill", pieces, seconds, options))
    on_cuda = worker.device.type == "cuda"
    return Report(
        model=Path(options.model_path).name,
        device=torch.cuda.get_device_name(worker.device) if on_cuda else "cpu",
        backend=runners.backend.name,
        kv_tokens=options.kv_tokens,
        phases=phases,
    )


def create_worker(options: argparse.Namespace) -> ModelWorker:
    """A worker with every graph captured, warmed up."""
    use_artifact_cache()
    config = engine_config(options)
    graph = replace(
        config.runner.graph,
        cuda_graph_bs=tuple(options.decode_sizes) if options.decode_sizes else None,
        piecewise_cuda_graph_tokens=tuple(options.prefill_levels)
        if options.prefill_levels
        else None,
    )
    runner = replace(config.runner, graph=graph, max_total_tokens=KV_POOL_TOKENS)
    worker = OfflineEngine(replace(config, runner=runner)).worker
    assert isinstance(worker, ModelWorker)
    return worker


def measure_phase(
    worker: ModelWorker,
    phase: str,
    compiled: GraphRunner | None,
    compile_seconds: float | None,
    options: argparse.Namespace,
) -> PhaseFigures:
    """Every captured size of one phase; ``compiled`` holds Inductor's variant of some."""
    mode = ForwardMode.DECODE if phase == "decode" else ForwardMode.EXTEND
    runners = worker.runners
    runner: GraphRunner | None = runners.decode if phase == "decode" else runners.prefill
    assert runner is not None
    captured = {size: replace(stats) for size, stats in runner.stats().items()}
    operations = count_operations(worker, [runner.graphs(size) for size in captured])
    batches = {size: plain_batch(mode, size, options.kv_tokens) for size in captured}
    some = {size: batches[size] for size in compiled.sizes} if compiled is not None else {}
    eager_ms: dict[int, float] = {}
    graph_ms: dict[int, float] = {}
    compiled_ms: dict[int, float] = {}
    gc.collect()
    gc.freeze()  # as the engine does when it is ready
    for _ in range(options.rounds):
        measure_round(worker, runners.eager, batches, eager_ms)
        measure_round(worker, runner, batches, graph_ms)
        if compiled is not None:
            measure_round(worker, compiled, some, compiled_ms)
    figures = [
        SizeFigures(
            size=size,
            smallest=below + 1,
            eager_ms=eager_ms[size],
            graph_ms=graph_ms[size],
            compiled_ms=compiled_ms.get(size),
            operations=count,
            graphs=len(runner.graphs(size)),
            capture_seconds=captured[size].seconds,
            nbytes=captured[size].nbytes,
        )
        for (below, size), count in zip(pairwise((0, *captured)), operations, strict=True)
    ]
    return PhaseFigures(
        phase=phase, sizes=figures, dropped=list(runner.dropped), compile_seconds=compile_seconds
    )


def plain_batch(mode: ForwardMode, size: int, kv_tokens: int) -> ForwardBatch:
    """Dummy rows or tokens, greedy. All of them lie on the dummy page, whose rereading is kinder
    to the caches than real requests are."""
    batch = dummy_batch(mode, size, pinned=torch.cuda.is_available())
    batch.sampling = SamplingBatch()
    if mode is ForwardMode.DECODE:
        batch.inputs.seq_lens.fill_(kv_tokens)
    return batch


def measure_round(
    worker: ModelWorker, runner: Runner, batches: Mapping[int, ForwardBatch], best: dict[int, float]
) -> None:
    """Measures every size once; ``best`` keeps the shortest time of each, in ms."""
    for size, batch in batches.items():
        taken = step_ms(worker, runner, batch)
        best[size] = min(taken, best.get(size, taken))


def step_ms(worker: ModelWorker, runner: Runner, batch: ForwardBatch) -> float:
    """Milliseconds of one step among many."""
    on_cpu = worker.device.type == "cpu"
    clock = time.process_time if on_cpu else time.perf_counter

    def seconds_of(steps: int) -> float:
        begin = clock()
        launched = [worker.launch_with(runner, batch) for _ in range(steps)]
        launched[-1].wait()
        return clock() - begin

    seconds_of(1)
    once = max(seconds_of(1), 1e-6)
    steps = min(max(STEPS[0], math.ceil(ROUND_SECONDS / once)), STEPS[1])
    return 1e3 * seconds_of(steps) / steps


def count_operations(worker: ModelWorker, graphs: Sequence[Sequence[Graph]]) -> list[int]:
    """Operations in each list of graphs: by profiling one replay of each, as a captured graph
    cannot be asked; a recorded one knows its ops."""
    stream = worker.cuda_stream
    if stream is None:
        return [
            sum(graph.num_nodes for graph in one if isinstance(graph, RecordedGraph))
            for one in graphs
        ]
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler, torch.cuda.stream(stream):
        for one in graphs:
            torch.cuda._sleep(1)  # type: ignore[no-untyped-call]
            for graph in one:
                graph.replay()
        torch.cuda.synchronize()
    return count_between_marks(_device_activities(profiler))


def _device_activities(profiler: Any) -> list[str]:
    """Names of all that the device did, by start."""
    events = profiler.profiler.kineto_results.events()
    found = [(e.start_ns(), e.name()) for e in events if e.device_type().name == "CUDA"]
    return [name for _, name in sorted(found)]


def count_between_marks(names: Sequence[str]) -> list[int]:
    """How many names follow each mark."""
    counts: list[int] = []
    for name in names:
        if MARK in name:
            counts.append(0)
        elif counts:
            counts[-1] += 1
    return counts


def _to_compile(
    worker: ModelWorker, asked: Sequence[int] | None, captured: Sequence[int]
) -> tuple[int, ...]:
    """Sizes for Inductor: those asked for that are captured, none on the CPU."""
    if worker.device.type == "cpu":
        return ()
    return tuple(size for size in captured if size in (asked or ()))


def _compiled_decode(worker: ModelWorker, sizes: tuple[int, ...]) -> tuple[CudaGraphRunner, float]:
    """As ``--enable-torch-compile`` captures them."""
    started = time.perf_counter()
    runner = CudaGraphRunner(
        parts=worker.runners.parts,
        sampler=worker.sampler,
        backend=worker.runners.backend,
        sizes_to_capture=sizes,
        compile_max_bs=max(sizes),
    )
    runner.capture(lambda phase, done, total: None)
    return runner, time.perf_counter() - started


def _compiled_prefill(
    worker: ModelWorker, levels: tuple[int, ...]
) -> tuple[PiecewiseCudaGraphRunner, float]:
    """As ``--piecewise-cuda-graph-compiler inductor`` captures them."""
    started = time.perf_counter()
    runner = PiecewiseCudaGraphRunner(
        parts=worker.runners.parts,
        backend=worker.runners.backend,
        cutter=TorchCompileCutter("inductor"),
        levels_to_capture=levels,
    )
    runner.prepare()
    runner.capture(lambda phase, done, total: None)
    return runner, time.perf_counter() - started


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="duograph bench graphs", description=__doc__)
    add_engine_flags(parser, model_required=False)
    add = parser.add_argument
    add("--decode-sizes", type=int, nargs="+", help="batch sizes to capture and measure")
    add("--prefill-levels", type=int, nargs="+", help="token levels to capture and measure")
    add(
        "--compile-decode-sizes",
        type=int,
        nargs="*",
        default=[1, 8, 32],
        help="batch sizes for which Inductor is tried, on CUDA",
    )
    add(
        "--compile-prefill-levels",
        type=int,
        nargs="*",
        default=[16, 512, 2048],
        help="token levels for which Inductor is tried, on CUDA",
    )
    add("--kv-tokens", type=int, default=128, help="length of every sequence of a decode step")
    add("--rounds", type=int, default=3)
    add("--json", help="file that gets all figures")
    add("--png", help="file that gets a picture of them; needs the bench extra")
    add("--from-json", help="show this earlier --json; nothing is measured")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
