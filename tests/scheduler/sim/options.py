"""What a seed expands to: the engine, the load and the faults of one simulated run."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Options:
    seed: int
    steps: int  # in which requests arrive; then the run drains
    page_size: int
    pool_pages: int  # without the dummy
    max_running: int
    chunk: int
    context: int
    max_queue: int
    optimistic: bool  # admission reserves nothing for what running requests will write
    prefix_cache: bool
    overlap: bool
    policy: str
    min_spared_tokens: int  # for which a newcomer waits for a twin
    frontends: int
    arrivals: float  # mean requests per step
    prompt_max: int
    output_max: int
    shared_prefixes: int  # prompts begin with one of so many; 0 = all different
    salts: int
    stop_rate: float  # requests with stop ids besides eos
    abort_rate: float  # per step
    abuse_rate: float  # per step: duplicate, unknown and late ids, senders that do not exist
    clock_jump_rate: float
    refuse_allocation_at: int  # every so many allocations one is refused; 0 = never
    fault_rate: float  # requests whose admission or first result raises
    device_failure_rate: float


def draw_options(seed: int, steps: int) -> Options:
    rng = random.Random(seed)
    page_size = rng.choice((1, 2, 3, 4, 8))
    max_running = rng.randint(1, 8)
    prompt_max = rng.choice((6, 14, 30))
    output_max = rng.choice((4, 12, 24))
    context = prompt_max + output_max + rng.randint(-3, 4)
    # from "one request fits" to "never full"
    pool_pages = -(-(prompt_max + output_max) // page_size) * rng.choice((1, 1, 2, 3, 8))
    is_rough = rng.random() < 0.3
    return Options(
        seed=seed,
        steps=steps,
        page_size=page_size,
        pool_pages=pool_pages + rng.randint(0, 2),
        max_running=max_running,
        chunk=rng.choice((3, 5, 8, 16, 64)),
        context=context,
        max_queue=rng.choice((2, 6, 20)),
        optimistic=rng.random() < 0.5,
        prefix_cache=rng.random() < 0.75,
        overlap=rng.random() < 0.6,
        policy=rng.choice(("fcfs", "lpm")),
        min_spared_tokens=rng.choice((1, 4, 1_000)),
        frontends=rng.randint(1, 3),
        arrivals=rng.choice((0.1, 0.3, 0.6)),
        prompt_max=prompt_max,
        output_max=output_max,
        shared_prefixes=rng.choice((0, 1, 2, 4)),
        salts=rng.choice((1, 1, 2)),
        stop_rate=rng.choice((0.0, 0.3)),
        abort_rate=rng.choice((0.0, 0.03, 0.15)),
        abuse_rate=rng.choice((0.0, 0.1)),
        clock_jump_rate=0.01 if is_rough else 0.0,
        refuse_allocation_at=rng.choice((0, 0, 3, 7, 23)),
        fault_rate=0.03 if is_rough else 0.0,
        device_failure_rate=0.002 if is_rough else 0.0,
    )
