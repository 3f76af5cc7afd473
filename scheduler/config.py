"""Configuration of the scheduler floor. Frozen and torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from duograph.runners.config import MEMORY_GROUP, option

DEBUG_GROUP = "Debug"


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Policy and limits. Sizes that depend on memory (pages, rows) come from the worker."""

    schedule_policy: str = option(
        "fcfs",
        "order of the waiting queue: first come first served, longest cached prefix first, or "
        "by the requests' priority field, the smallest number first",
        group=MEMORY_GROUP,
        choices=("fcfs", "lpm", "priority"),
    )
    disable_radix_cache: bool = option(
        False, "share no KV pages between requests", group=MEMORY_GROUP
    )
    disable_overlap_schedule: bool = option(
        False, "read each step's result before launching the next", group=MEMORY_GROUP
    )
    max_queue: int = option(
        256, "most waiting requests; one more is answered 503", group=MEMORY_GROUP, minimum=1
    )
    queue_timeout: float = option(
        60.0, "seconds a request may wait before it is answered 503", group=MEMORY_GROUP, minimum=0
    )
    request_timeout: float = option(
        600.0, "seconds a request may take in all", group=MEMORY_GROUP, minimum=0
    )
    grammar_backend: str = option(
        "llguidance",
        "library for structured output; none refuses it",
        group="API",
        choices=("llguidance", "none"),
    )
    grammar_timeout: float = option(
        5.0,
        "seconds that a grammar may take to compile, and all its masks of one request together",
        group="API",
        minimum=0.01,
        maximum=600,
    )
    decode_log_interval: int = option(
        40, "decode steps between two log lines", group="Observability", minimum=1
    )
    watchdog_timeout: float = option(
        30.0,
        "seconds without a finished step, while there is work, before the engine is stuck",
        group=DEBUG_GROUP,
        minimum=1,
    )
