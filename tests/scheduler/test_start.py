"""The engine's start: the collector is off from the first import until it is ready."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from duograph.runners.config import RunnerConfig
from duograph.runners.graph import freeze_gc
from duograph.scheduler.config import SchedulerConfig
from duograph.scheduler.engine_config import EngineConfig
from duograph.scheduler.messages import EngineInfo
from duograph.scheduler.model_worker import LoadedWorker
from duograph.scheduler.process import _Start
from duograph.scheduler.wires import Wires
from duograph.tests.scheduler.fake_worker import LIMITS, FakeWorker

SOURCE = str(Path(__file__).parents[2] / ".src")


class SilentWires:
    """Keeps what the engine tells everybody."""

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def to_frontends(self, message: Any) -> None:
        self.sent.append(message)

    def to_supervisor(self, message: Any) -> None:
        self.sent.append(message)


@pytest.fixture
def collector_off() -> Iterator[None]:
    gc.disable()
    yield
    gc.unfreeze()
    gc.enable()


def test_the_engine_process_imports_with_the_collector_off() -> None:
    code = "import duograph.scheduler.__main__, gc; print(gc.isenabled())"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": SOURCE},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout.strip() == "False"


def test_a_ready_engine_collects_and_says_what_its_start_took(collector_off: None) -> None:
    config = EngineConfig(
        runner=RunnerConfig(),
        scheduler=SchedulerConfig(),
        run_dir="",
        num_frontends=1,
        parent_pid=0,
        model_folder="",
        served_name="fake",
        spawned_at=0.0,  # of the monotonic clock: long ago
    )
    wires = SilentWires()
    start = _Start(cast(Wires, wires))
    start.create_engine(
        config, lambda config, progress: LoadedWorker(FakeWorker(), LIMITS, False, {})
    )
    assert gc.isenabled() and gc.get_freeze_count() > 0
    [info] = [message for message in wires.sent if isinstance(message, EngineInfo)]
    seconds = info.details["graphs"]["start_seconds"]
    assert list(seconds) == ["process", "warm_up"]
    assert seconds["process"] > 0


def test_captures_freeze_nothing_where_the_collector_is_off(collector_off: None) -> None:
    frozen = gc.get_freeze_count()
    with freeze_gc():
        assert gc.get_freeze_count() == frozen
    assert not gc.isenabled()
