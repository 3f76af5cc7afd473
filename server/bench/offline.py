"""``duograph bench offline``: output tokens/s of many requests at once, engine in process.

256 requests, prompt and output lengths uniform in 100..1024, temperature 0.6, seed 0. With
``--steps`` the run is traced: how many steps of each kind, how large, and where time went.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import sys
from pathlib import Path
from typing import Any

from duograph.scheduler.offline import OfflineEngine
from duograph.server.bench.in_process import (
    add_engine_flags,
    create_engine,
    random_prompt,
    sampled,
    seconds_of,
)
from duograph.server.bench.step_trace import TracedWorker, as_dicts, load_traced, step_table


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="duograph bench offline", description=__doc__)
    add_engine_flags(parser)
    add_workload_flags(parser)
    parser.add_argument("--steps", action="store_true", help="time every step, print a table")
    parser.add_argument("--json", type=Path, help="write the figures there, with --steps each step")
    options = parser.parse_args(arguments)
    engine = create_engine(options, load_traced if options.steps else None)
    figures = measure(engine, options)
    if options.json is not None:
        options.json.write_text(json.dumps(figures))
    return 0


def add_workload_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--min-len", type=int, default=100)
    parser.add_argument("--max-len", type=int, default=1024)
    parser.add_argument("--temperature", type=float, default=0.6)
    parser.add_argument("--seed", type=int, default=0)


def measure(engine: OfflineEngine, options: argparse.Namespace) -> dict[str, Any]:
    """Runs the workload of ``options``, prints its figures and returns them."""
    rng = random.Random(options.seed)

    def length() -> int:
        return rng.randint(options.min_len, options.max_len)

    prompts = [
        random_prompt(rng, length(), engine.limits.vocab_size) for _ in range(options.requests)
    ]
    sampling = [sampled(length(), options.temperature, seed) for seed in range(options.requests)]
    few = prompts[:8]
    engine.generate(few, [sampled(16, options.temperature, 0)] * len(few))
    gc.collect()
    gc.freeze()  # as the engine process does
    traced = engine.worker if isinstance(engine.worker, TracedWorker) else None
    if traced is not None:
        traced.clear()
    results = engine.generate(prompts, sampling)
    seconds = seconds_of(results)
    tokens = sum(len(result.tokens) for result in results)
    prompt_tokens = sum(map(len, prompts))
    print(f"{options.requests} requests, {prompt_tokens} prompt and {tokens} output tokens")
    print(f"{seconds:.2f} s, {tokens / seconds:.0f} output tokens/s")
    figures: dict[str, Any] = {
        "requests": options.requests,
        "prompt_tokens": prompt_tokens,
        "output_tokens": tokens,
        "seconds": seconds,
        "tokens_per_s": tokens / seconds,
    }
    if traced is not None:
        records = traced.records()
        print("\n".join(step_table(records)))
        figures["steps"] = as_dicts(records)
    return figures


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
