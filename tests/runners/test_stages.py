"""The stop-watch of a start-up, and the count of what was compiled."""

from __future__ import annotations

from types import SimpleNamespace

from duograph.runners.stages import StageClock, TritonCompiles


def test_laps_add_up_to_the_time_since_the_start() -> None:
    now = [100.0]
    clock = StageClock(lambda: now[0])
    for stage, moment in (("load", 103.0), ("capture", 104.5), ("load", 110.0)):
        now[0] = moment
        clock.lap(stage)
    assert clock.seconds == {"load": 8.5, "capture": 1.5}
    assert list(clock.seconds) == ["load", "capture"]
    assert sum(clock.seconds.values()) == now[0] - 100.0


def test_compilations_are_counted_apart_from_what_the_cache_had() -> None:
    counts = TritonCompiles()
    for cache_hit, microseconds in ((False, 1_500_000), (True, 900), (False, 250_000)):
        counts(
            src=None,
            metadata={},
            metadata_group={},
            times=SimpleNamespace(total=microseconds),
            cache_hit=cache_hit,
        )
    assert counts.as_dict() == {
        "triton_compiled": 2,
        "triton_cached": 1,
        "triton_compile_seconds": 1.75,
    }
