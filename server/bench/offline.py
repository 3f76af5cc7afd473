"""``duograph bench offline``: output tokens/s of many requests at once, engine in process.

256 requests, prompt and output lengths uniform in 100..1024, temperature 0.6, seed 0.
"""

from __future__ import annotations

import argparse
import random
import sys

from duograph.server.bench.in_process import (
    add_engine_flags,
    create_engine,
    random_prompt,
    sampled,
    seconds_of,
)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="duograph bench offline", description=__doc__)
    add_engine_flags(parser)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--min-len", type=int, default=100)
    parser.add_argument("--max-len", type=int, default=1024)
    parser.add_argument("--temperature", type=float, default=0.6)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    engine = create_engine(options)
    rng = random.Random(options.seed)

    def length() -> int:
        return rng.randint(options.min_len, options.max_len)

    prompts = [
        random_prompt(rng, length(), engine.limits.vocab_size) for _ in range(options.requests)
    ]
    sampling = [sampled(length(), options.temperature, seed) for seed in range(options.requests)]
    engine.generate(prompts[:8], [sampled(16, options.temperature, 0)] * 8)
    results = engine.generate(prompts, sampling)
    seconds = seconds_of(results)
    tokens = sum(len(result.tokens) for result in results)
    prompt_tokens = sum(map(len, prompts))
    print(f"{options.requests} requests, {prompt_tokens} prompt and {tokens} output tokens")
    print(f"{seconds:.2f} s, {tokens / seconds:.0f} output tokens/s")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
