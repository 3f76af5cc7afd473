"""``duograph bench cpu-peer``: decode speed on CPU against transformers' ``generate``.

Both engines are loaded into one process, share its threads, and take turns, so that other load
on the machine meets both alike. Greedy, end of sequence ignored, random prompt tokens.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from duograph.runners.config import RunnerConfig
from duograph.runners.sampling_params import SamplingParams
from duograph.scheduler.config import SchedulerConfig
from duograph.scheduler.engine_config import EngineConfig
from duograph.scheduler.offline import Generation, OfflineEngine
from duograph.server.model_store import resolve_model


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="duograph bench cpu-peer", description=__doc__)
    parser.add_argument("--model-path", default="", help="default: the bundled default model")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--input-len", type=int, default=64)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--batch", type=int, default=8, help="requests at once, second figure")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    model = resolve_model(options.model_path, "auto", os.environ, lambda line: print(line))
    folder = str(model.folder)
    engine = _engine(folder, options.dtype)
    peer = _transformers(folder, options.dtype)
    rng = random.Random(0)

    def prompt() -> list[int]:
        return [rng.randrange(100, engine.limits.vocab_size) for _ in range(options.input_len)]

    ours: list[float] = []
    batched: list[float] = []
    theirs: list[float] = []
    for round_number in range(options.rounds + 1):
        torch.set_num_threads(options.threads)
        figures = (
            _decode_rate(_generate(engine, [prompt()], options.output_len)),
            _decode_rate(
                _generate(engine, [prompt() for _ in range(options.batch)], options.output_len)
            ),
            peer(prompt(), options.output_len),
        )
        if round_number:  # the first warms up
            for series, figure in zip((ours, batched, theirs), figures, strict=True):
                series.append(figure)
    _report(options, ours, batched, theirs)
    return 0


def _engine(folder: str, dtype: str) -> OfflineEngine:
    return OfflineEngine(
        EngineConfig(
            runner=RunnerConfig(model_path=folder, dtype=dtype, device="cpu"),
            scheduler=SchedulerConfig(disable_radix_cache=True),
            run_dir="",
            num_frontends=1,
            parent_pid=os.getppid(),
            model_folder=folder,
            served_name="bench",
        )
    )


def _generate(engine: OfflineEngine, prompts: list[list[int]], length: int) -> list[Generation]:
    sampling = SamplingParams(max_new_tokens=length, temperature=0.0, ignore_eos=True)
    return engine.generate(prompts, [sampling] * len(prompts))


def _decode_rate(generations: list[Generation]) -> float:
    """Tokens per second of all requests together, from the moment that all have begun."""
    begun = max(generation.times[0] for generation in generations)
    ended = max(generation.times[-1] for generation in generations)
    tokens = sum(sum(1 for at in g.times if at > begun) for g in generations)
    return tokens / (ended - begun)


def _transformers(folder: str, dtype: str) -> Callable[[list[int], int], float]:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    model.eval()

    def seconds(ids: torch.Tensor, count: int) -> float:
        started = time.perf_counter()
        with torch.no_grad():
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                min_new_tokens=count,
                max_new_tokens=count,
                pad_token_id=0,
            )
        return time.perf_counter() - started

    def rate(prompt: list[int], length: int) -> float:
        ids = torch.tensor([prompt])
        return (length - 1) / (seconds(ids, length) - seconds(ids, 1))

    return rate


def _report(
    options: argparse.Namespace, ours: list[float], batched: list[float], theirs: list[float]
) -> None:
    single, many, peer = map(statistics.median, (ours, batched, theirs))
    print(
        f"\ndecode tokens/s, {options.dtype}, {options.threads} threads, {options.input_len} in, "
        f"{options.output_len} out, median of {options.rounds} rounds (min - max)"
    )
    for name, series in (
        ("transformers generate, 1 request", theirs),
        ("duograph, 1 request", ours),
        (f"duograph, {options.batch} requests", batched),
    ):
        middle = statistics.median(series)
        print(f"  {name:34} {middle:8.1f}  ({min(series):.1f} - {max(series):.1f})")
    print(f"  duograph / transformers            {single / peer:8.2f}x")
    print(f"  {options.batch} requests / 1 request             {many / single:8.2f}x")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
