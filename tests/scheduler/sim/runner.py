"""Runs seeds; a failure names the seed, its options and the command that replays it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from duograph.tests.scheduler.sim.options import draw_options
from duograph.tests.scheduler.sim.world import World

RUN_STEPS = 130  # with arrivals; draining adds to them

# At least so many times, or the runs have not shown much.
MUST_REACH = {
    "retraction": 100,
    "prompt scored": 100,
    "eviction": 100,
    "chunk split": 100,
    "cache hit": 100,
    "pool full": 100,
    "abort queued": 50,
    "abort prefill": 50,
    "abort chunk gap": 50,
    "abort decode": 50,
    "abort retracted": 50,
    "abort finishing": 50,
    "allocation refused": 50,
    "admission fault": 50,
    "commit fault": 50,
    "engine failed": 20,
    "finished timeout": 50,
    "finished overloaded": 50,
    "finished context_length_exceeded": 50,
    "finished stop": 50,
}


class SimulationFailed(AssertionError):
    pass


def run_seed(seed: int, steps: int = RUN_STEPS) -> tuple[Counter[str], int]:
    """What was reached, and the steps made. Raises SimulationFailed."""
    return run_seeds([seed], steps)


def run_steps(target: int) -> Counter[str]:
    """Seeds from 0 on until ``target`` steps have been made. Raises SimulationFailed."""
    reached: Counter[str] = Counter()
    seed = total = 0
    while total < target:
        found, steps = run_seed(seed)
        reached += found
        total += steps
        seed += 1
    return reached


def run_seeds(seeds: Iterable[int], steps: int = RUN_STEPS) -> tuple[Counter[str], int]:
    reached: Counter[str] = Counter()
    total = 0
    for seed in seeds:
        options = draw_options(seed, steps)
        world = World(options, reached)
        try:
            world.run()
        except Exception as error:
            raise SimulationFailed(
                f"seed {seed}, step {world.steps}: {type(error).__name__}: {error}\n{options}\n"
                f"replay: python -m duograph.tests.scheduler.sim --seed {seed} --steps {steps}"
            ) from error
        total += world.steps
    return reached, total
