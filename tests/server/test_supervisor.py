"""The supervisor's loop over small real processes that stand in for engine and frontends."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from duograph.scheduler.channel import Receiver, supervisor_address
from duograph.scheduler.exit_codes import ExitCode
from duograph.scheduler.messages import ToSupervisor
from duograph.server import supervisor as supervisor_module
from duograph.server.child import Child
from duograph.server.signals import SignalQueue
from duograph.server.startup import StartupReport
from duograph.server.supervisor import Supervisor

pytestmark = pytest.mark.slow

SOURCE_ROOT = Path(supervisor_module.__file__).parents[2]
STAY = "import signal, time\nsignal.signal(signal.SIGTERM, lambda *_: exit(0))\ntime.sleep(60)"
STUBBORN = "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(60)"


def engine_script(address: str, message: str, after: str) -> str:
    return f"""
import signal, sys, time, zmq
from duograph.scheduler.channel import Sender
from duograph.scheduler.messages import EngineStatus, Heartbeat, ProcessFailed
signal.signal(signal.SIGTERM, lambda *_: exit(0))
context = zmq.Context()
sender = Sender(context, {address!r})
sender.send(EngineStatus(phase="loading_weights", done=1, total=2))
sender.send({message})
{after}
sender.close(linger_ms=1000)
context.term()
"""


READY = 'EngineStatus(phase="ready")'


class DeadAtOnce(Child):
    """A child whose death by SIGKILL is seen in the very next look at it."""

    def send(self, number: int) -> None:
        super().send(number)
        if number == signal.SIGKILL:
            self.process.wait()


class Tree:
    """One supervisor and its children, run in the test's own process."""

    def __init__(self, folder: Path) -> None:
        self.address = supervisor_address(str(folder))
        self.children: list[Child] = []
        self.context = zmq.Context()
        self.messages: Receiver[ToSupervisor] = Receiver(self.context, self.address, ToSupervisor)
        self.signals = SignalQueue()

    def child(self, role: str, script: str) -> Child:
        environ = {**os.environ, "PYTHONPATH": str(SOURCE_ROOT)}
        process = subprocess.Popen([sys.executable, "-c", script], env=environ)
        self.children.append(DeadAtOnce(role, process))
        return self.children[-1]

    def run(
        self,
        *,
        engine: str = "",
        frontend: str = STAY,
        first_request: Callable[[], str | None] | None = None,
        shutdown_timeout: float = 5.0,
        silence_timeout: float = 60.0,
    ) -> ExitCode:
        engine = engine or engine_script(self.address, READY, "time.sleep(60)")
        return Supervisor(
            scheduler=self.child("scheduler", engine),
            frontends=[self.child("frontend 0", frontend)],
            messages=self.messages,
            signals=self.signals,
            report=StartupReport(bars=False),
            first_request=first_request,
            shutdown_timeout=shutdown_timeout,
            silence_timeout=silence_timeout,
        ).run()

    def close(self) -> None:
        for child in self.children:
            child.process.kill()
            child.process.wait()
        self.messages.close()
        self.context.destroy(linger=0)
        self.signals.close()


@pytest.fixture
def tree(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tree]:
    handlers = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    tree = Tree(tmp_path_factory.mktemp("run"))
    yield tree
    tree.close()
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO)
    return caplog


def when_ready(log: pytest.LogCaptureFixture, action: Callable[[], object]) -> threading.Thread:
    """Calls ``action`` once the server has said that it is ready."""

    def wait() -> None:
        deadline = time.monotonic() + 30
        while "ready to roll" not in log.text and time.monotonic() < deadline:
            time.sleep(0.02)
        action()

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


def end_self(number: int) -> None:
    os.kill(os.getpid(), number)


def assert_all_gone(tree: Tree) -> None:
    assert all(child.process.returncode is not None for child in tree.children)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_the_first_signal_drains_and_exits_0(
    tree: Tree, log: pytest.LogCaptureFixture, number: int
) -> None:
    thread = when_ready(log, lambda: end_self(number))
    assert tree.run(first_request=lambda: None) == ExitCode.OK
    thread.join()
    assert_all_gone(tree)
    assert "The server is fired up and ready to roll!" in log.messages
    assert "Loading safetensors checkpoint shards, tensors: 1/2" in log.messages
    assert [child.process.returncode for child in tree.children] == [0, 0]


def test_a_sigterm_that_comes_twice_is_one(tree: Tree, log: pytest.LogCaptureFixture) -> None:
    def twice() -> None:
        end_self(signal.SIGTERM)
        deadline = time.monotonic() + 10
        while "SIGTERM: draining" not in log.text and time.monotonic() < deadline:
            time.sleep(0.02)
        end_self(signal.SIGTERM)

    thread = when_ready(log, twice)
    assert tree.run(first_request=lambda: None) == ExitCode.OK
    thread.join()
    assert_all_gone(tree)
    assert [child.process.returncode for child in tree.children] == [0, 0]


def test_the_second_signal_ends_at_once(tree: Tree, log: pytest.LogCaptureFixture) -> None:
    def twice() -> None:
        end_self(signal.SIGINT)
        deadline = time.monotonic() + 10
        while "SIGINT: draining" not in log.text and time.monotonic() < deadline:
            time.sleep(0.02)
        end_self(signal.SIGINT)

    thread = when_ready(log, twice)
    assert tree.run(frontend=STUBBORN, shutdown_timeout=60) == ExitCode.INTERRUPTED
    thread.join()
    assert_all_gone(tree)


def test_a_frontend_that_does_not_drain_is_cut_off(
    tree: Tree, log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor_module, "HARD_STOP_S", 0.2)
    monkeypatch.setattr(supervisor_module, "END_GRACE_S", 0.2)
    thread = when_ready(log, lambda: end_self(signal.SIGTERM))
    assert tree.run(frontend=STUBBORN, shutdown_timeout=0.2) == ExitCode.OK
    thread.join()
    assert_all_gone(tree)
    assert "cut off" in log.text


def test_a_killed_engine_ends_the_tree(tree: Tree, log: pytest.LogCaptureFixture) -> None:
    thread = when_ready(log, lambda: tree.children[0].process.kill())
    assert tree.run(frontend=STUBBORN) == ExitCode.SCHEDULER_DIED
    thread.join()
    assert_all_gone(tree)
    assert "the scheduler process was killed by SIGKILL" in log.text


def test_a_killed_frontend_ends_the_tree(tree: Tree, log: pytest.LogCaptureFixture) -> None:
    thread = when_ready(log, lambda: tree.children[1].process.kill())
    assert tree.run() == ExitCode.FRONTEND_DIED
    thread.join()
    assert_all_gone(tree)


def test_a_frontend_that_was_asked_to_end_takes_the_tree_along(
    tree: Tree, log: pytest.LogCaptureFixture
) -> None:
    thread = when_ready(log, lambda: tree.children[1].process.terminate())
    assert tree.run() == ExitCode.OK
    thread.join()
    assert_all_gone(tree)


@pytest.mark.parametrize(
    ("code", "expected"),
    [(3, ExitCode.MODEL), (4, ExitCode.OUT_OF_MEMORY), (1, ExitCode.SCHEDULER_DIED)],
)
def test_last_words_give_reason_and_exit_code(
    tree: Tree, log: pytest.LogCaptureFixture, code: int, expected: ExitCode
) -> None:
    words = f'ProcessFailed(exit_code={code}, message="tensor x is missing")'
    engine = engine_script(tree.address, words, "")
    assert tree.run(engine=engine) == expected
    assert_all_gone(tree)
    assert "scheduler: tensor x is missing" in log.text


def test_an_engine_that_fails_without_a_word_still_gives_its_exit_code(tree: Tree) -> None:
    assert tree.run(engine="raise SystemExit(4)") == ExitCode.OUT_OF_MEMORY
    assert_all_gone(tree)


def test_a_failing_first_request_is_not_called_ready(
    tree: Tree, log: pytest.LogCaptureFixture
) -> None:
    assert tree.run(first_request=lambda: "it was answered 500: oops") == ExitCode.INTERNAL
    assert_all_gone(tree)
    assert "the first request failed: it was answered 500: oops" in log.text
    assert "ready to roll" not in log.text


def test_an_engine_that_stops_beating_is_killed(tree: Tree, log: pytest.LogCaptureFixture) -> None:
    engine = engine_script(tree.address, READY, "sender.send(Heartbeat(1, 0, 0)); time.sleep(60)")
    assert tree.run(engine=engine, silence_timeout=0.3) == ExitCode.SCHEDULER_DIED
    assert_all_gone(tree)
    assert "the scheduler process has been silent" in log.text


def beating_frontend(address: str, beats: int, *, draining: bool = False) -> str:
    """Sends ``beats`` beats, a tenth of a second apart, and is stuck afterwards."""
    return f"""
import signal, time, zmq
from duograph.scheduler.channel import Sender
from duograph.scheduler.messages import FrontendBeat
signal.signal(signal.SIGTERM, lambda *_: exit(0))
context = zmq.Context()
sender = Sender(context, {address!r})
for _ in range({beats}):
    sender.send(FrontendBeat(0, {draining}))
    time.sleep(0.1)
time.sleep(60)
"""


def test_a_frontend_that_stops_beating_ends_the_tree(
    tree: Tree, log: pytest.LogCaptureFixture
) -> None:
    code = tree.run(frontend=beating_frontend(tree.address, 3), silence_timeout=1.0)
    assert code == ExitCode.FRONTEND_DIED
    assert "the frontend 0 process has been silent for 1 s" in log.text


def test_a_frontend_that_beats_is_left_alone(tree: Tree, log: pytest.LogCaptureFixture) -> None:
    def end_after_two_limits() -> None:
        time.sleep(2.0)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = when_ready(log, end_after_two_limits)
    code = tree.run(frontend=beating_frontend(tree.address, 600), silence_timeout=1.0)
    thread.join()
    assert code == ExitCode.OK


def test_a_frontend_that_drains_has_the_others_drain_at_once(
    tree: Tree, log: pytest.LogCaptureFixture
) -> None:
    """Not only when it has ended, or the two drains would take twice the time."""
    frontend = beating_frontend(tree.address, 600, draining=True)
    assert tree.run(frontend=frontend, shutdown_timeout=20) == ExitCode.OK
    assert "frontend 0 was asked to end: draining" in log.text
    assert tree.children[1].signals_sent[0] == signal.SIGTERM


def test_a_frontend_that_never_beats_once_the_engine_serves_ends_the_tree(
    tree: Tree, log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor_module, "FRONTEND_START_S", 1.0)
    beat = "sender.send(Heartbeat(1, 0, 0))\ntime.sleep(60)"
    assert tree.run(engine=engine_script(tree.address, READY, beat)) == ExitCode.FRONTEND_DIED
    assert "the frontend 0 process has been silent" in log.text


def test_a_death_tells_the_frontends_not_to_wait(tree: Tree, log: pytest.LogCaptureFixture) -> None:
    told = "import signal, time\nsignal.signal(signal.SIGQUIT, lambda *_: exit(9))\ntime.sleep(60)"
    thread = when_ready(log, lambda: tree.children[0].process.kill())
    assert tree.run(frontend=told) == ExitCode.SCHEDULER_DIED
    thread.join()
    assert tree.children[1].process.returncode == 9


def test_garbage_on_the_socket_is_dropped(tree: Tree, log: pytest.LogCaptureFixture) -> None:
    raw = tree.context.socket(zmq.PUSH)
    raw.connect(tree.address)
    raw.send(b"\x80\x04garbage")
    raw.send_multipart((b"DGR1", b"\xc1\xff"))
    thread = when_ready(log, lambda: end_self(signal.SIGTERM))
    assert tree.run() == ExitCode.OK
    thread.join()
    raw.close(linger=0)
    assert tree.messages.dropped == 2
