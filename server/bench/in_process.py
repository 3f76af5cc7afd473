"""What the in-process benchmarks share: their flags, the engine, random prompts."""

from __future__ import annotations

import argparse
import os
import random
from collections.abc import Callable

from duograph.runners.config import GraphConfig, RunnerConfig
from duograph.runners.sampling_params import SamplingParams
from duograph.scheduler.config import SchedulerConfig
from duograph.scheduler.engine_config import EngineConfig
from duograph.scheduler.model_worker import LoadedWorker, Progress, load_worker
from duograph.scheduler.offline import Generation, OfflineEngine
from duograph.server.artifact_cache import engine_environment

Load = Callable[[EngineConfig, Progress], LoadedWorker]


def add_engine_flags(parser: argparse.ArgumentParser, *, model_required: bool = True) -> None:
    """Flags of the engine under test, spelled as those of ``duograph serve``."""
    parser.add_argument(
        "--model-path", required=model_required, help="folder with at least a config.json"
    )
    parser.add_argument("--load-format", default="dummy", choices=("auto", "dummy"))
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="auto", choices=("auto", "cuda", "cpu"))
    parser.add_argument("--attention-backend", default="auto")
    parser.add_argument("--prefill-attention-backend")
    parser.add_argument("--decode-attention-backend")
    parser.add_argument("--context-length", type=int, default=16384)
    parser.add_argument("--page-size", type=int, default=RunnerConfig.page_size)
    parser.add_argument("--cuda-graph-max-bs", type=int)
    parser.add_argument("--disable-cuda-graph", action="store_true")
    parser.add_argument("--enable-torch-compile", action="store_true")
    parser.add_argument("--disable-piecewise-cuda-graph", action="store_true")
    parser.add_argument("--piecewise-cuda-graph-compiler", default="auto")
    parser.add_argument("--disable-overlap-schedule", action="store_true")


def engine_config(options: argparse.Namespace) -> EngineConfig:
    """The engine of the flags, prefix cache off: every prompt is computed."""
    graph = GraphConfig(
        cuda_graph_max_bs=options.cuda_graph_max_bs,
        disable_cuda_graph=options.disable_cuda_graph,
        enable_torch_compile=options.enable_torch_compile,
        disable_piecewise_cuda_graph=options.disable_piecewise_cuda_graph,
        piecewise_cuda_graph_compiler=options.piecewise_cuda_graph_compiler,
    )
    return EngineConfig(
        runner=RunnerConfig(
            model_path=options.model_path,
            load_format=options.load_format,
            dtype=options.dtype,
            device=options.device,
            attention_backend=options.attention_backend,
            prefill_attention_backend=options.prefill_attention_backend,
            decode_attention_backend=options.decode_attention_backend,
            context_length=options.context_length,
            page_size=options.page_size,
            graph=graph,
        ),
        scheduler=SchedulerConfig(
            disable_radix_cache=True,
            disable_overlap_schedule=options.disable_overlap_schedule,
            queue_timeout=1e6,
            request_timeout=1e6,
            max_queue=1_000_000,
        ),
        run_dir="",
        num_frontends=1,
        parent_pid=os.getppid(),
        model_folder=options.model_path,
        served_name="bench",
    )


def use_artifact_cache() -> None:
    """Compiled code of this process is kept where the daemon's engine keeps it."""
    os.environ.update(engine_environment(os.environ))


def random_prompt(rng: random.Random, length: int, vocab_size: int) -> list[int]:
    return [rng.randrange(vocab_size) for _ in range(length)]


def greedy(max_new_tokens: int) -> SamplingParams:
    return SamplingParams(max_new_tokens=max_new_tokens, temperature=0.0, ignore_eos=True)


def sampled(max_new_tokens: int, temperature: float, seed: int) -> SamplingParams:
    return SamplingParams(
        max_new_tokens=max_new_tokens, temperature=temperature, seed=seed, ignore_eos=True
    )


def seconds_of(results: list[Generation]) -> float:
    """From the call of ``generate`` to the last token of all."""
    for result in results:
        if result.error:
            raise RuntimeError(f"a request failed: {result.error}")
    return max(result.times[-1] for result in results)


def create_engine(options: argparse.Namespace, load: Load | None = None) -> OfflineEngine:
    """Loads and captures; compiled code is kept where the daemon's engine keeps it. ``load`` makes
    the worker, if it is not to be the plain one."""
    use_artifact_cache()
    return OfflineEngine(engine_config(options), load or load_worker)
