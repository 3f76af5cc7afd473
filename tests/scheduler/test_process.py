"""The engine process around a fake worker: real sockets, real signals, real exit codes."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import zmq

from duograph.runners.config import RunnerConfig
from duograph.runners.sampling_params import SamplingParams
from duograph.scheduler.channel import (
    HEADER,
    Receiver,
    Sender,
    frontend_address,
    scheduler_address,
    supervisor_address,
)
from duograph.scheduler.config import SchedulerConfig
from duograph.scheduler.engine_config import EngineConfig
from duograph.scheduler.exit_codes import ExitCode
from duograph.scheduler.messages import (
    RID_FRONTEND_SHIFT,
    AbortRequest,
    EngineInfo,
    EngineStatus,
    Finished,
    GenerateRequest,
    Heartbeat,
    MetricsSnapshot,
    ProcessFailed,
    StepTokens,
    ToFrontend,
    ToSupervisor,
)
from duograph.server.child import Child, start_child
from duograph.tests.scheduler.fake_worker import LIMITS, token_at

pytestmark = pytest.mark.slow
SOURCE = Path(__file__).parents[2] / ".src"
ENGINE = "duograph.tests.scheduler.fake_engine"
START_S = 90.0  # importing torch on a busy machine


class Peer:
    """Frontend 0 and the supervisor of one engine process."""

    def __init__(self, run_dir: Path, kind: str, **scheduler: Any) -> None:
        self.context: zmq.Context[Any] = zmq.Context()
        self.run_dir = str(run_dir)
        self.from_engine: Receiver[Any] = Receiver(
            self.context, frontend_address(self.run_dir, 0), ToFrontend
        )
        self.at_supervisor: Receiver[Any] = Receiver(
            self.context, supervisor_address(self.run_dir), ToSupervisor
        )
        self.messages: list[Any] = []
        self.failed: ProcessFailed | None = None
        self.tokens: dict[int, list[int]] = {}
        self.finished: dict[int, Finished] = {}
        self.phases: list[str] = []
        self.config = EngineConfig(
            runner=RunnerConfig(),
            scheduler=SchedulerConfig(**scheduler),
            run_dir=self.run_dir,
            num_frontends=2,
            parent_pid=os.getpid(),
            model_folder=f"/nowhere/{kind}",
            served_name="fake",
        )
        environ = {**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
        self.child: Child = start_child("scheduler", ENGINE, self.config, environ=environ)
        self.to_engine = Sender(self.context, scheduler_address(self.run_dir))

    def pump(self) -> None:
        self.from_engine.wait(0.02)
        for message in self.at_supervisor.drain():
            if isinstance(message, ProcessFailed):
                self.failed = message
        for message in self.from_engine.drain():
            self.messages.append(message)
            if isinstance(message, EngineStatus):
                self.phases.append(message.phase)
            elif isinstance(message, StepTokens):
                for rid, token in zip(message.rids, message.tokens, strict=True):
                    self.tokens.setdefault(rid, []).append(token)
                for finished in message.finished:
                    assert finished.rid not in self.finished
                    self.finished[finished.rid] = finished

    def wait_for(self, condition: Callable[[], bool], seconds: float = 30.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"waited too long: {self.messages[-5:]}"
            self.pump()

    def until_ready(self) -> Peer:
        self.wait_for(lambda: "ready" in self.phases or self.child.exit_code() is not None, START_S)
        assert self.child.exit_code() is None
        return self

    def send(self, rid: int, *, prompt: int = 6, new: int = 8, **sampling: Any) -> None:
        params = SamplingParams(max_new_tokens=new, seed=rid, **sampling)
        message = GenerateRequest(rid=rid, input_ids=[rid % 50 + 5] * prompt, sampling=params)
        assert self.to_engine.send(message)

    def latest(self, kind: type[Any]) -> Any:
        return next((m for m in reversed(self.messages) if isinstance(m, kind)), None)

    def exit_code(self, seconds: float = START_S) -> int:
        self.wait_for(lambda: self.child.exit_code() is not None, seconds)
        self.pump()
        code = self.child.exit_code()
        assert code is not None
        return code

    def close(self) -> None:
        if self.child.exit_code() is None:
            self.child.process.kill()
            self.child.process.wait()
        self.to_engine.close()
        self.from_engine.close()
        self.at_supervisor.close()
        self.context.term()


StartPeer = Callable[..., Peer]


@pytest.fixture
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartPeer]:
    peers: list[Peer] = []

    def start_peer(kind: str = "fine", **scheduler: Any) -> Peer:
        # short: a socket path has 107 bytes
        peers.append(Peer(tmp_path_factory.mktemp("e"), kind, **scheduler))
        return peers[-1]

    yield start_peer
    for peer in peers:
        peer.close()


def test_it_says_how_far_it_is_then_serves_and_ends_on_sigterm(start: StartPeer) -> None:
    peer = start().until_ready()
    order = ["starting", "loading_weights", "capturing_decode", "warming_up", "ready"]
    assert [phase for phase in order if phase in peer.phases] == order
    info = peer.latest(EngineInfo)
    assert info.max_total_num_tokens == LIMITS.max_total_num_tokens
    assert info.vocab_size == LIMITS.vocab_size and info.details["kind"] == "fine"
    for rid in range(1, 9):
        peer.send(rid)
    peer.send(20, prompt=200)
    peer.wait_for(lambda: len(peer.finished) == 9)
    for rid in range(1, 9):
        assert peer.tokens[rid] == [token_at(rid, 6 + i) for i in range(8)]
    assert peer.finished[20].error_code == "context_length_exceeded"
    peer.child.send(signal.SIGINT)  # the supervisor decides about it
    peer.send(30)
    peer.wait_for(lambda: 30 in peer.finished)
    peer.child.send(signal.SIGTERM)
    assert peer.exit_code(10.0) == ExitCode.OK


def test_an_abort_frees_everything_and_gets_no_answer(start: StartPeer) -> None:
    peer = start().until_ready()
    peer.send(1, prompt=10, new=100)
    peer.wait_for(lambda: len(peer.tokens.get(1, [])) > 3)
    assert peer.to_engine.send(AbortRequest(rid=1))

    def all_free() -> bool:
        snapshot = peer.latest(MetricsSnapshot)
        if snapshot is None:
            return False
        values = {name.partition("{")[0]: value for name, value in snapshot.gauges.items()}
        aborted = [n for name, n in snapshot.counters.items() if "num_aborted" in name]
        return aborted == [1.0] and values["sglang:num_used_tokens"] == 0.0

    peer.wait_for(all_free)
    assert 1 not in peer.finished and len(peer.tokens[1]) < 100


def test_an_idle_engine_sends_heartbeats_and_takes_no_processor_time(start: StartPeer) -> None:
    peer = start().until_ready()
    peer.send(1)
    peer.wait_for(lambda: 1 in peer.finished)
    process = psutil.Process(peer.child.pid)
    before, beats = process.cpu_times(), len([m for m in peer.messages if type(m) is Heartbeat])
    started = time.monotonic()
    peer.wait_for(lambda: len([m for m in peer.messages if type(m) is Heartbeat]) >= beats + 6)
    seconds = time.monotonic() - started
    after = process.cpu_times()
    assert seconds >= 2.0, "six heartbeats, half a second apart"
    used = after.user + after.system - before.user - before.system
    assert used < 0.2 * seconds, f"{used:.2f} s of processor time in {seconds:.1f} idle ones"
    assert peer.latest(Heartbeat).steps > 0 and peer.latest(Heartbeat).running == 0


def test_garbage_on_the_socket_is_survived(start: StartPeer) -> None:
    peer = start().until_ready()
    attacker = peer.context.socket(zmq.PUSH)
    attacker.setsockopt(zmq.LINGER, 0)
    attacker.connect(scheduler_address(peer.run_dir))
    rng = random.Random(1)
    for number in range(2_000):
        attacker.send_multipart([HEADER, rng.randbytes(60)])
        if number % 100 == 0:
            peer.send(number)
    peer.send(2**63 - 1)  # a frontend that does not exist
    peer.wait_for(lambda: len(peer.finished) == 20)
    attacker.close()
    assert {f.reason for f in peer.finished.values()} == {"length"}
    for rid, tokens in peer.tokens.items():
        assert tokens == [token_at(rid, 6 + i) for i in range(8)]


def test_a_frontend_that_is_not_there_disturbs_nobody(start: StartPeer) -> None:
    peer = start().until_ready()
    peer.send(1 << RID_FRONTEND_SHIFT)  # frontend 1 never binds its socket
    peer.send(5)
    peer.wait_for(lambda: 5 in peer.finished)


@pytest.mark.parametrize(
    ("kind", "code", "words"),
    [
        ("broken-model", ExitCode.MODEL, "num_heads is missing"),
        ("unreadable-model", ExitCode.MODEL, "cannot read model.safetensors"),
        ("out-of-memory", ExitCode.OUT_OF_MEMORY, "--cuda-graph-max-bs"),
    ],
)
def test_a_start_that_fails_says_why_in_one_line_and_by_its_exit_code(
    start: StartPeer, kind: str, code: ExitCode, words: str
) -> None:
    peer = start(kind)
    assert peer.exit_code() == code
    peer.wait_for(lambda: peer.failed is not None, 5.0)
    assert peer.failed is not None and peer.failed.exit_code == code
    assert words in peer.failed.message and "\n" not in peer.failed.message


@pytest.mark.parametrize("plain", [True, False])
def test_a_device_error_ends_every_request_and_the_process(start: StartPeer, plain: bool) -> None:
    peer = start("device-error", disable_overlap_schedule=plain).until_ready()
    for rid in range(1, 7):
        peer.send(rid, new=50)
    assert peer.exit_code(20.0) == ExitCode.SCHEDULER_DIED
    peer.wait_for(lambda: len(peer.finished) == 6 and peer.failed is not None, 5.0)
    assert {f.error_code for f in peer.finished.values()} == {"internal"}
    assert peer.failed is not None and "device-side assert" in peer.failed.message


def test_sigterm_while_loading_ends_it(start: StartPeer) -> None:
    peer = start("slow-start")
    peer.wait_for(lambda: "capturing_decode" in peer.phases, START_S)
    peer.child.send(signal.SIGTERM)
    assert peer.exit_code(10.0) == ExitCode.OK


def test_a_stuck_step_ends_the_process_with_a_stack_dump(
    start: StartPeer, capfd: pytest.CaptureFixture[str]
) -> None:
    peer = start("hangs", watchdog_timeout=2.0).until_ready()
    peer.send(1)
    assert peer.exit_code(20.0) != 0
    assert "Timeout" in capfd.readouterr().err


def test_it_does_not_outlive_its_parent(tmp_path: Path) -> None:
    """A parent that starts an engine and is killed; and an engine told of another parent."""
    script = f"""
import os, sys, time
from duograph.runners.config import RunnerConfig
from duograph.scheduler.config import SchedulerConfig
from duograph.scheduler.engine_config import EngineConfig
from duograph.server.child import start_child
config = EngineConfig(runner=RunnerConfig(), scheduler=SchedulerConfig(), run_dir={str(tmp_path)!r},
                      num_frontends=1, parent_pid=int(sys.argv[1]) or os.getpid(),
                      model_folder="fine", served_name="fake")
child = start_child("scheduler", {ENGINE!r}, config, environ=os.environ)
print(child.pid, flush=True)
child.process.wait()
"""
    environ = {**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}

    def parent(claimed_pid: int) -> tuple[subprocess.Popen[str], psutil.Process]:
        process = subprocess.Popen(
            [sys.executable, "-c", script, str(claimed_pid)],
            stdout=subprocess.PIPE, text=True, env=environ,
        )  # fmt: skip
        assert process.stdout is not None
        return process, psutil.Process(int(process.stdout.readline()))

    killed, child = parent(0)
    killed.kill()
    killed.wait()
    psutil.wait_procs([child], timeout=10)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
    liar, child = parent(1)
    assert liar.wait(START_S) == 0, "the engine left by itself, and its parent with it"


def test_memory_stays_flat_over_many_requests(start: StartPeer) -> None:
    peer = start(decode_log_interval=10_000).until_ready()
    process = psutil.Process(peer.child.pid)

    def has_finished(count: int) -> bool:
        return len(peer.finished) >= count

    def serve(first: int, count: int) -> None:
        for sent in range(count):
            peer.send(first + sent, prompt=8, new=3)
            behind = sent - 100  # at most so many are under way
            peer.wait_for(partial(has_finished, behind), 60.0)
        peer.wait_for(lambda: len(peer.finished) == count, 60.0)
        peer.finished.clear()
        peer.tokens.clear()
        peer.messages.clear()

    serve(0, 1_000)
    before = process.memory_info().rss
    serve(1_000, 4_000)
    grown = process.memory_info().rss - before
    assert grown < 0.02 * before, f"{grown / 2**20:.1f} MiB more after 4,000 requests"
