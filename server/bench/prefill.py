"""``duograph bench prefill``: one prompt, one token out, engine in process; median of rounds."""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from collections.abc import Sequence

from duograph.scheduler.offline import OfflineEngine
from duograph.server.bench.in_process import (
    add_engine_flags,
    create_engine,
    greedy,
    random_prompt,
    seconds_of,
)

LENGTHS = [16, 128, 512, 1024, 2048, 4096, 8192]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="duograph bench prefill", description=__doc__)
    add_engine_flags(parser)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(arguments)
    engine = create_engine(options)
    measure(engine, options.lengths, rounds=options.rounds)
    return 0


def measure(engine: OfflineEngine, lengths: Sequence[int], *, rounds: int = 5) -> None:
    """Prints one line per prompt length."""
    rng = random.Random(0)
    print("prompt tokens | ms to first token (min - max)")
    for length in lengths:
        times = []
        for round_number in range(rounds + 1):
            prompt = random_prompt(rng, length, engine.limits.vocab_size)
            seconds = seconds_of(engine.generate([prompt], [greedy(1)]))
            if round_number:  # the first warms up
                times.append(1e3 * seconds)
        middle = statistics.median(times)
        print(f"{length:13} | {middle:8.2f} ({min(times):.2f} - {max(times):.2f})", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
