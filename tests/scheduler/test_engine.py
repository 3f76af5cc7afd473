"""The engine's verbs: log lines, backlog of a slow frontend, integrity check."""

from __future__ import annotations

import faulthandler
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from duograph.scheduler import wires as wires_module
from duograph.scheduler.batch_builder import BatchBuilder
from duograph.scheduler.channel import Receiver, Sender, frontend_address, scheduler_address
from duograph.scheduler.config import SchedulerConfig
from duograph.scheduler.engine import Engine
from duograph.scheduler.grammar import NoGrammars
from duograph.scheduler.grammar_gate import GrammarGate
from duograph.scheduler.loop import overlap_loop
from duograph.scheduler.messages import (
    RID_FRONTEND_SHIFT,
    AbortRequest,
    ControlRequest,
    Heartbeat,
    StepTokens,
    ToFrontend,
)
from duograph.scheduler.scheduler import Scheduler
from duograph.scheduler.wires import FrontendStuck, Wires
from duograph.tests.scheduler.driver import request
from duograph.tests.scheduler.fake_worker import LIMITS, FakeWorker


@pytest.fixture
def wires(tmp_path: Path) -> Iterator[Wires]:
    wires = Wires(str(tmp_path), 1)
    yield wires
    wires.close(0)
    # an engine's beat has armed it, and nobody would beat again before it ends this process
    faulthandler.cancel_dump_traceback_later()


def create_engine(
    wires: Wires, worker: FakeWorker | None = None, config: SchedulerConfig | None = None
) -> Engine:
    return Engine(
        scheduler=Scheduler(config or SchedulerConfig(), LIMITS, 1),
        worker=worker or FakeWorker(),
        builder=BatchBuilder(page_size=LIMITS.page_size, pinned=False),
        wires=wires,
        gate=GrammarGate(NoGrammars("no library"), timeout_s=5.0, max_waiting=8),
        model_name="fake",
        log_interval=5,
        watchdog_timeout=60.0,
    )


def test_batches_are_logged_in_the_words_that_scripts_look_for(
    wires: Wires, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = create_engine(wires)
    with zmq.Context() as context, caplog.at_level(logging.INFO):
        sender = Sender(context, scheduler_address(str(tmp_path)))
        receiver: Receiver[Any] = Receiver(context, frontend_address(str(tmp_path), 0), ToFrontend)
        assert sender.send(request(1, prompt=10, new=12))
        got: list[Any] = []
        send = engine.send

        def send_and_stop(step):  # type: ignore[no-untyped-def]
            send(step)
            if step.outputs and step.outputs[0].finished:
                engine.stop()

        engine.send = send_and_stop  # type: ignore[method-assign]
        overlap_loop(engine)
        deadline = time.monotonic() + 10
        while sum(len(m.tokens) for m in got if isinstance(m, StepTokens)) < 12:
            assert time.monotonic() < deadline
            receiver.wait(0.05)
            got += receiver.drain()
        assert any(isinstance(m, Heartbeat) for m in got)
        sender.close()
        receiver.close()
    lines = [record.getMessage() for record in caplog.records]
    assert "Prefill batch, #new-seq: 1, #new-token: 10, #cached-token: 0" in lines
    decode = [line for line in lines if line.startswith("Decode batch, #running-req: 1, #token: ")]
    assert len(decode) == 2, "eleven decode steps, a line every five"
    for words in (
        "token usage: 0.0",
        "cuda graph: False",
        "gen throughput (token/s): ",
        "#queue-req: 0",
    ):
        assert words in decode[0]


def test_a_frontend_that_stops_reading_loses_nothing_until_the_engine_gives_up(
    wires: Wires, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wires_module, "MAX_BACKLOG", 50)
    count = 0
    with pytest.raises(FrontendStuck, match="frontend 0"):
        for count in range(20_000):
            wires.to_frontend(0, Heartbeat(count, 0, 0))
    monkeypatch.setattr(wires_module, "MAX_BACKLOG", 20_000)
    with zmq.Context() as context:
        receiver: Receiver[Any] = Receiver(context, frontend_address(str(tmp_path), 0), ToFrontend)
        got: list[int] = []
        deadline = time.monotonic() + 20
        while len(got) < count + 1:
            assert time.monotonic() < deadline
            receiver.wait(0.05)
            got += [m.steps for m in receiver.drain()]
            if len(got) <= count:
                wires.to_frontend(0, Heartbeat(-1, 0, 0))
        assert got[: count + 1] == list(range(count + 1)), "in order, none lost"
        receiver.close()


def idle(engine: Engine, waits: int) -> None:
    for _ in range(waits):
        engine._next_beat = time.monotonic() + 0.01
        engine.receive(block=True)


def test_books_that_do_not_add_up_are_reported_when_the_engine_stays_idle(
    wires: Wires, caplog: pytest.LogCaptureFixture
) -> None:
    engine = create_engine(wires)
    idle(engine, 3)
    assert not caplog.records
    engine.receive(block=False)
    engine.scheduler.queues.kv.pool._free.pop()
    idle(engine, 1)
    assert not caplog.records, "the next request may come at any moment, and would have to wait"
    idle(engine, 5)
    assert len(caplog.records) == 1, "once, not at every heartbeat"
    assert "integrity check failed: pages lost" in caplog.text


def test_a_fault_inside_one_request_is_logged_with_its_traceback(
    wires: Wires, caplog: pytest.LogCaptureFixture
) -> None:
    engine = create_engine(wires)

    def fail(*_: object) -> bool:
        raise RuntimeError("planted")

    engine.scheduler._planner._open = fail  # type: ignore[method-assign, assignment]
    engine.send(engine.scheduler.step([request(1)], 0.0))
    assert "request 1 failed inside the engine" in caplog.text and "planted" in caplog.text
    assert not engine.scheduler.fault_log


def test_a_queue_that_is_no_longer_full_is_told_at_once(
    wires: Wires, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the frontends send nothing until the next beat, and the device idles."""
    monkeypatch.setattr("duograph.scheduler.engine.HEARTBEAT_S", 3600.0)
    engine = create_engine(wires, config=SchedulerConfig(max_queue=3))
    rows = LIMITS.max_running_requests
    engine.scheduler.step([request(rid) for rid in range(rows + 3)], 0.0)
    with zmq.Context() as context:
        receiver: Receiver[Any] = Receiver(context, frontend_address(str(tmp_path), 0), ToFrontend)

        def heard() -> list[int]:
            receiver.wait(0.5)
            return [m.waiting for m in receiver.drain() if isinstance(m, Heartbeat)]

        assert engine.alive() and heard() == [3]
        assert engine.alive() and heard() == [], "nothing has changed"
        engine.scheduler.step([AbortRequest(rows + 2)], 0.0)
        assert engine.alive() and heard() == [2], "there is room again"
        engine.scheduler.step([AbortRequest(rows + 1)], 0.0)
        assert engine.alive() and heard() == [], "there still is"
        receiver.close()


def test_orders_are_answered_to_the_frontend_that_gave_them(
    wires: Wires, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = create_engine(wires)
    with zmq.Context() as context:
        receiver: Receiver[Any] = Receiver(context, frontend_address(str(tmp_path), 0), ToFrontend)
        orders = [
            ControlRequest(5, "flush_cache"),
            ControlRequest(6, "abort_named", "nobody"),
            ControlRequest(7, "stop_profile"),
            ControlRequest(8, "start_profile", "many"),
            ControlRequest(9 << RID_FRONTEND_SHIFT, "flush_cache"),  # of a frontend that is not
        ]
        newcomer = request(1)
        monkeypatch.setattr(wires.requests, "drain", lambda: [*orders[:2], newcomer, *orders[2:]])
        assert engine.receive(block=False) == [newcomer]
        answers: list[Any] = []
        deadline = time.monotonic() + 10
        while len(answers) < 4 and time.monotonic() < deadline:
            receiver.wait(0.1)
            answers += receiver.drain()
        receiver.close()
    assert [(answer.id, answer.ok) for answer in answers] == [
        (5, True),
        (6, True),
        (7, False),
        (8, False),
    ]
    assert answers[0].text == "0 pages freed" and answers[1].text == "0"
