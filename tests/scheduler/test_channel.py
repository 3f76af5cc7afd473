"""The wire: bounded, non-blocking, and deaf to whatever is not a message."""

from __future__ import annotations

import os
import pickle
import random
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from duograph.runners.sampling_params import SamplingParams
from duograph.scheduler.channel import (
    HEADER,
    HIGH_WATER_MARK,
    Receiver,
    Sender,
    scheduler_address,
)
from duograph.scheduler.messages import AbortRequest, GenerateRequest, ToScheduler

HOSTILE_FRAMES = 10_000


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    context: zmq.Context[Any] = zmq.Context()
    yield context
    context.destroy(linger=0)


def wait_for(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.002)


class MakesAFile:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (str(self.path),))


def hostile(rng: random.Random, trap: Path) -> list[bytes]:
    """The frames of one message that is none."""
    good = msgspec.msgpack.encode(AbortRequest(rid=1))
    kind = rng.randrange(10)
    if kind == 0:
        return [HEADER, pickle.dumps(MakesAFile(trap))]
    if kind == 1:
        return [pickle.dumps(MakesAFile(trap))]
    if kind == 2:
        return [HEADER, rng.randbytes(rng.randrange(1, 200))[:-1] + b"\xc1"]
    if kind == 3:
        return [HEADER, b"\x91" * 100_000]  # nested beyond any stack
    if kind == 4:
        return [HEADER, good[: rng.randrange(len(good))]]
    if kind == 5:
        return [b"DGR0", good]
    if kind == 6:
        return [HEADER, good, good]
    if kind == 7:
        return [HEADER, msgspec.msgpack.encode({"type": "generate", "rid": "1"})]
    if kind == 8:
        return [HEADER, msgspec.msgpack.encode({"type": "eval", "code": "1"})]
    return [HEADER, b""]


def test_hostile_frames_are_counted_and_dropped_and_nothing_in_them_runs(
    context: zmq.Context[Any], tmp_path: Path
) -> None:
    receiver: Receiver[Any] = Receiver(context, scheduler_address(str(tmp_path)), ToScheduler)
    attacker = context.socket(zmq.PUSH)
    attacker.setsockopt(zmq.SNDHWM, 0)
    attacker.connect(scheduler_address(str(tmp_path)))
    sender = Sender(context, scheduler_address(str(tmp_path)))
    rng = random.Random(5)
    trap = tmp_path / "trap"
    wanted = [AbortRequest(rid=index) for index in range(20)]
    received: list[Any] = []
    for number in range(HOSTILE_FRAMES):
        attacker.send_multipart(hostile(rng, trap))
        if number % (HOSTILE_FRAMES // 20) == 0:
            assert sender.send(wanted[number // (HOSTILE_FRAMES // 20)])
        received += receiver.drain()

    def all_there() -> bool:
        received.extend(receiver.drain())
        return receiver.dropped == HOSTILE_FRAMES and len(received) == len(wanted)

    wait_for(all_there)
    assert received == wanted, "real messages pass, in order"
    assert not trap.exists(), "a pickle was run"


def test_raw_bytes_on_the_socket_file_do_no_harm(context: zmq.Context[Any], tmp_path: Path) -> None:
    receiver: Receiver[Any] = Receiver(context, scheduler_address(str(tmp_path)), ToScheduler)
    rng = random.Random(7)
    for _ in range(50):
        with socket.socket(socket.AF_UNIX) as raw:
            raw.connect(str(tmp_path / "scheduler.sock"))
            try:
                raw.sendall(rng.randbytes(300))
            except OSError:
                continue  # the peer has hung up already
    sender = Sender(context, scheduler_address(str(tmp_path)))
    assert sender.send(AbortRequest(rid=3))
    messages: list[Any] = []
    deadline = time.monotonic() + 20.0
    while not messages and time.monotonic() < deadline:
        receiver.wait(0.5)  # garbage wakes it too
        messages = receiver.drain()
    assert messages == [AbortRequest(rid=3)]


def test_a_request_survives_the_wire_unchanged(context: zmq.Context[Any], tmp_path: Path) -> None:
    receiver: Receiver[Any] = Receiver(context, scheduler_address(str(tmp_path)), ToScheduler)
    sender = Sender(context, scheduler_address(str(tmp_path)))
    request = GenerateRequest(
        rid=2**62,
        input_ids=[0, 5, 2**31],
        sampling=SamplingParams(seed=-(2**63), logit_bias={7: -1.5}, stop_token_ids=(3, 4)),
        cache_salt="é",
    )
    assert sender.send(request)
    assert receiver.wait(10.0)
    assert receiver.drain() == [request]


def test_a_full_pipe_refuses_and_never_blocks(context: zmq.Context[Any], tmp_path: Path) -> None:
    sender = Sender(context, scheduler_address(str(tmp_path)))  # nobody reads
    sent = 0
    while sender.send(AbortRequest(rid=sent)):
        sent += 1
        assert sent <= 2 * HIGH_WATER_MARK + 10
    assert sent >= HIGH_WATER_MARK and sender.refused == 1
