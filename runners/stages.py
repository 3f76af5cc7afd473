"""Where the time of a start-up goes: a stop-watch with laps, and what Triton has compiled.

Laps leave no gap: their sum is the time since the clock was made. This file knows no stage.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


class StageClock:
    """Attributes:
    seconds: of each stage, in the order in which they were first met.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._mark = clock()
        self.seconds: dict[str, float] = {}

    def lap(self, stage: str) -> float:
        """All time since the last lap belongs to ``stage``. Returns it."""
        now = self._clock()
        taken, self._mark = now - self._mark, now
        self.seconds[stage] = self.seconds.get(stage, 0.0) + taken
        return taken


class TritonCompiles:
    """Counts Triton's compilations of this process, from its own listener.

    Attributes:
        compiled: kernels that were compiled, ``seconds`` in all.
        cached: kernels that were found in the cache folder.
    """

    def __init__(self) -> None:
        self.compiled = 0
        self.cached = 0
        self.seconds = 0.0

    def __call__(self, *, times: Any, cache_hit: bool, **_: Any) -> None:
        if cache_hit:
            self.cached += 1
        else:
            self.compiled += 1
            self.seconds += times.total / 1e6

    def install(self) -> None:
        """Listens from now on. Triton has one listener: the last one wins."""
        from triton import knobs

        knobs.compilation.listener = self

    def as_dict(self) -> dict[str, float]:
        return {
            "triton_compiled": self.compiled,
            "triton_cached": self.cached,
            "triton_compile_seconds": round(self.seconds, 3),
        }
