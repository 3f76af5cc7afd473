"""Runs simulated histories: ``python -m duograph.tests.scheduler.sim --seed N`` replays one.

Without --seed: ``--runs`` seeds from ``--first`` on. Prints what was reached.
"""

from __future__ import annotations

import argparse
import time

from duograph.tests.scheduler.sim.runner import RUN_STEPS, run_seed, run_seeds


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m duograph.tests.scheduler.sim")
    parser.add_argument("--seed", type=int, help="replay this one")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--steps", type=int, default=RUN_STEPS, help="steps with arrivals")
    arguments = parser.parse_args()
    started = time.perf_counter()
    if arguments.seed is not None:
        reached, steps = run_seed(arguments.seed, arguments.steps)
    else:
        seeds = range(arguments.first, arguments.first + arguments.runs)
        reached, steps = run_seeds(seeds, arguments.steps)
    seconds = time.perf_counter() - started
    for name, count in sorted(reached.items()):
        print(f"{count:9} {name}")
    print(f"{steps:9} steps in {seconds:.1f} s, {1e6 * seconds / steps:.0f} us each")


if __name__ == "__main__":
    main()
