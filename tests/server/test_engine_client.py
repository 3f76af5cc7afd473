"""The wire between a frontend and its engine: late frontends, garbage, failures of one request."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import zmq

from duograph.runners.sampling_params import SamplingParams
from duograph.scheduler.channel import HEADER, Receiver, Sender, frontend_address
from duograph.scheduler.messages import (
    RID_FRONTEND_SHIFT,
    EngineInfo,
    EngineStatus,
    Finished,
    GenerateRequest,
    StepTokens,
    ToScheduler,
)
from duograph.server.engine_client import EngineClient, Sequence

COMPLETIONS = "/v1/completions"


def test_tokens_that_wait_go_out_in_one_chunk(new_server: Any, eventually: Any) -> None:
    server = new_server(engine={"step_s": 0.002})
    body = {"prompt": [40] * 8, "ignore_eos": True, "max_tokens": 400, "stream": True}
    chunks: list[str] = []
    first = threading.Event()

    def read() -> None:
        with httpx.stream("POST", server.url + COMPLETIONS, json=body, timeout=60) as answer:
            for line in answer.iter_lines():
                if line and "[DONE]" not in line:
                    chunks.append(json.loads(line.removeprefix("data: "))["choices"][0]["text"])
                    first.set()

    reader = threading.Thread(target=read)
    reader.start()
    assert first.wait(20)
    os.kill(server.frontend.pid, signal.SIGSTOP)
    stopped = time.monotonic()
    while time.monotonic() - stopped < 0.5:  # the engine goes on meanwhile
        time.sleep(0.05)
    os.kill(server.frontend.pid, signal.SIGCONT)
    reader.join(60)
    texts = [text for text in chunks if text]
    assert sum(map(len, texts)) == 400
    # half a second of 2 ms steps waited, and came as few pieces
    assert max(map(len, texts)) > 50


def test_garbage_on_the_socket_is_counted_and_nothing_else(new_server: Any) -> None:
    server = new_server()
    http = server.http()
    address = frontend_address(str(server.log.parent), 0)
    context = zmq.Context()
    push = context.socket(zmq.PUSH)
    push.connect(address)
    garbage = [
        [b""], [b"x"], [HEADER], [b"DGR9", b"\x80"], [HEADER, b""], [HEADER, b"\xc1"],
        [HEADER, b"\x91" * 5000], [HEADER, b"\x80", b"\x80"], [HEADER, os.urandom(500)],
        [b"cos\nsystem\n(S'touch /tmp/x'\ntR."],
    ]  # fmt: skip
    for frames in garbage * 20:
        push.send_multipart(frames)
    sender = Sender(context, address)
    wrong = [
        StepTokens(rids=[1, 2], tokens=[1], finished=[]),
        StepTokens(rids=[2**60], tokens=[5], finished=[Finished(77, "stop", 1, 1, 0)]),
    ]
    for message in wrong:
        assert sender.send(message)
    deadline = time.monotonic() + 10
    expected = f'duograph_frontend_dropped_frames_total{{frontend="0"}} {20 * len(garbage) + 1}.0'
    while expected not in http.get("/metrics").text:
        assert time.monotonic() < deadline, http.get("/metrics").text
    answer = http.post(COMPLETIONS, json={"prompt": "The quick"}).json()
    assert answer["choices"][0]["text"] == "The quick"
    push.close(linger=0)
    sender.close()
    context.term()


class Recorder:
    """A consumer that notes what it gets, and fails when told to."""

    def __init__(self, *, broken: bool = False) -> None:
        self.sequence: Sequence | None = None
        self.tokens: list[int] = []
        self.calls = 0
        self.failures = 0
        self._broken = broken

    def consume(self) -> None:
        self.calls += 1
        assert self.sequence is not None
        if self._broken:
            raise RuntimeError("this request cannot be handled")
        self.tokens += self.sequence.take()

    def failed(self) -> None:
        self.failures += 1


class Wires:
    """An engine client and the scheduler's ends of its sockets."""

    def __init__(self, folder: Path) -> None:
        self.context = zmq.Context()
        scheduler = f"ipc://{folder}/s.sock"
        own = f"ipc://{folder}/f.sock"
        self.requests: Receiver[ToScheduler] = Receiver(self.context, scheduler, ToScheduler)
        self.client = EngineClient(
            scheduler_address=scheduler,
            own_address=own,
            frontend_index=3,
            heartbeat_timeout_s=30.0,
        )
        self.answers = Sender(self.context, own)

    def close(self) -> None:
        self.client.close()
        self.requests.close()
        self.answers.close()
        self.context.term()


@pytest.fixture
def wires(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Wires]:
    import tempfile

    with tempfile.TemporaryDirectory(prefix="dg-") as folder:
        wires = Wires(Path(folder))
        yield wires
        wires.close()


async def until(condition: Any) -> None:
    import asyncio

    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)


def submit(wires: Wires, recorder: Recorder) -> int:
    recorder.sequence = wires.client.submit([1, 2], SamplingParams(), recorder)
    return recorder.sequence.rid


async def test_all_waiting_messages_are_handed_over_in_one_call(wires: Wires) -> None:
    wires.client.start()
    one, two = Recorder(), Recorder()
    rids = [submit(wires, one), submit(wires, two)]
    assert all(rid >> RID_FRONTEND_SHIFT == 3 for rid in rids)
    await until(lambda: wires.requests.has_messages())
    received = [m for m in wires.requests.drain() if isinstance(m, GenerateRequest)]
    assert received[0].input_ids == [1, 2]
    for step in range(5):
        wires.answers.send(StepTokens(rids=rids, tokens=[step, 10 + step], finished=[]))
    time.sleep(0.05)  # blocks the loop, so that all five wait
    await until(lambda: len(two.tokens) == 5)
    assert (one.tokens, two.tokens) == ([0, 1, 2, 3, 4], [10, 11, 12, 13, 14])
    assert one.calls <= 2


async def test_one_request_that_cannot_be_handled_does_not_disturb_the_others(
    wires: Wires,
) -> None:
    wires.client.start()
    broken, sound = Recorder(broken=True), Recorder()
    rids = [submit(wires, broken), submit(wires, sound)]
    wires.answers.send(StepTokens(rids=rids, tokens=[5, 6], finished=[]))
    await until(lambda: sound.tokens == [6])
    assert broken.failures == 1


async def test_nothing_is_handed_over_after_an_abort_or_the_end(wires: Wires) -> None:
    wires.client.start()
    aborted, ended = Recorder(), Recorder()
    first, second = submit(wires, aborted), submit(wires, ended)
    assert aborted.sequence is not None
    wires.client.abort(aborted.sequence)
    wires.client.abort(aborted.sequence)
    finished = Finished(second, "length", 2, 1, 0)
    wires.answers.send(StepTokens(rids=[first, second], tokens=[1, 2], finished=[finished]))
    wires.answers.send(StepTokens(rids=[first, second], tokens=[3, 4], finished=[]))
    wires.answers.send(EngineStatus(phase="warming_up"))
    await until(lambda: wires.client.status.phase == "warming_up")
    assert (aborted.tokens, ended.tokens) == ([], [2])
    assert wires.client.running == 0
    kinds: list[str] = []

    def two_requests_and_an_abort() -> bool:
        kinds.extend(type(m).__name__ for m in wires.requests.drain())
        return len(kinds) >= 3

    await until(two_requests_and_an_abort)
    assert kinds == ["GenerateRequest", "GenerateRequest", "AbortRequest"]


async def test_it_is_ready_when_the_limits_are_known_and_dead_when_silent(wires: Wires) -> None:
    wires.client.start()
    wires.answers.send(EngineStatus(phase="ready"))
    await until(lambda: wires.client.status.phase == "ready")
    assert not wires.client.ready  # the limits are not known yet
    wires.answers.send(EngineInfo(100, 8, 64, 512, {}))
    await until(lambda: wires.client.ready)
    assert wires.client.alive
    wires.client.now -= 31.0
    assert not wires.client.alive
