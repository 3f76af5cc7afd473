"""``duograph bench decode``: inter-token latency by batch size, engine in process.

n prompts of 64 random tokens, greedy, end of sequence ignored; inter-token latency = (time for
136 tokens out - time for 8 out) / 128, best of ``--rounds``.
"""

from __future__ import annotations

import argparse
import random
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

LONG, SHORT = 136, 8
BATCH_SIZES = [1, 8, 32, 64, 128, 256]
INPUT = 64  # tokens


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="duograph bench decode", description=__doc__)
    add_engine_flags(parser)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=BATCH_SIZES)
    parser.add_argument("--input-len", type=int, default=INPUT)
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args(arguments)
    engine = create_engine(options)
    measure(engine, options.batch_sizes, input_len=options.input_len, rounds=options.rounds)
    return 0


def measure(
    engine: OfflineEngine, batch_sizes: Sequence[int], *, input_len: int = INPUT, rounds: int = 2
) -> None:
    """Prints one line per batch size."""
    rng = random.Random(0)
    print("batch | inter-token ms | tokens/s")
    for batch in batch_sizes:
        best: dict[int, float] = {}
        for _ in range(rounds):
            prompts = [
                random_prompt(rng, input_len, engine.limits.vocab_size) for _ in range(batch)
            ]
            for length in (SHORT, LONG):
                seconds = seconds_of(engine.generate(prompts, [greedy(length)] * batch))
                best[length] = min(seconds, best.get(length, seconds))
        latency = (best[LONG] - best[SHORT]) / (LONG - SHORT)
        print(f"{batch:5} | {1e3 * latency:14.3f} | {batch / latency:8.0f}", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
