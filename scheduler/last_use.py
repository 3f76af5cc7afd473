"""When each graph was replayed last, from the counts of two heartbeats: to half a second, and
without a clock being read at any step. Knows the shape of ``ModelWorker.graph_stats``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_PHASES = ("decode", "prefill")


class LastUse:
    """Replays before the first call are the start's own warm-up and count as no use."""

    def __init__(self) -> None:
        self._replays: dict[tuple[str, str], int] | None = None
        self._times: dict[tuple[str, str], float] = {}

    def update(self, stats: Mapping[str, Any], now: float) -> dict[str, float]:
        """Gauges by full name: ``now`` of the heartbeat that found new replays, for every size
        that has had any. ``now`` in seconds since 1970."""
        replays = {
            (phase, size): int(one["replays"])
            for phase in _PHASES
            for size, one in stats[phase]["sizes"].items()
        }
        if self._replays is not None:
            for key, count in replays.items():
                if count > self._replays.get(key, 0):
                    self._times[key] = now
        self._replays = replays
        return {
            f'duograph_graph_last_replay_timestamp_seconds{{phase="{phase}",size="{size}"}}': time
            for (phase, size), time in self._times.items()
        }
