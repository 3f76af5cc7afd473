"""The one ZMQ wrapper: bounded, non-blocking, pickle-free pipes over ipc sockets.

A frame is hostile input until it is decoded: random bytes written to the socket file do reach
a PULL socket. So a message is exactly two frames, a fixed header and a msgpack body of a known
type; anything else is counted and dropped, never raised.
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import msgspec
import zmq

T = TypeVar("T")

HEADER = b"DGR1"  # magic and wire version
MAX_MESSAGE_BYTES = 64 * 1024 * 1024
HIGH_WATER_MARK = 10_000  # messages; a full pipe makes send() return False


class Receiver(Generic[T]):
    """The bound, reading end of a pipe. Several senders may connect to one receiver."""

    def __init__(self, context: zmq.Context[Any], address: str, message_type: Any) -> None:
        """``message_type`` is one of the unions of messages.py. Raises zmq.ZMQError."""
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(message_type)
        self._socket = context.socket(zmq.PULL)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self._socket.bind(address)
        self.dropped = 0  # malformed messages since start

    def drain(self, limit: int = 1_000) -> list[T]:
        """Every message that waits, at most ``limit``; never blocks."""
        messages: list[T] = []
        for _ in range(limit):
            # asked first: an exception for nothing is ten times as slow, at every step
            if not self.has_messages():
                break
            message = self._decode(self._socket.recv_multipart(zmq.NOBLOCK))
            if message is not None:
                messages.append(message)
        return messages

    def wait(self, timeout_s: float, *, other: int | None = None) -> bool:
        """Blocks until a message waits, the descriptor ``other`` is readable, or the time is
        over; True if one of the first two."""
        if other is None:
            return bool(self._socket.poll(int(timeout_s * 1000), zmq.POLLIN))
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(other, zmq.POLLIN)
        return bool(poller.poll(int(timeout_s * 1000)))

    def fileno(self) -> int:
        """For an event loop. Edge-triggered: after a wake-up drain until empty."""
        return int(self._socket.getsockopt(zmq.FD))

    def has_messages(self) -> bool:
        return bool(self._socket.getsockopt(zmq.EVENTS) & zmq.POLLIN)

    def close(self) -> None:
        self._socket.close(linger=0)

    def _decode(self, frames: list[bytes]) -> T | None:
        if len(frames) != 2 or frames[0] != HEADER:
            self.dropped += 1
            return None
        try:
            return self._decoder.decode(frames[1])
        except (msgspec.DecodeError, RecursionError):
            self.dropped += 1
            return None


class Sender:
    """The connected, writing end of a pipe."""

    def __init__(self, context: zmq.Context[Any], address: str) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._socket = context.socket(zmq.PUSH)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
        self._socket.connect(address)
        self.refused = 0  # messages not sent because the pipe was full

    def send(self, message: msgspec.Struct) -> bool:
        """False if the pipe is full. Raises OverflowError or TypeError for a message that
        msgpack cannot carry."""
        body = self._encoder.encode(message)
        try:
            self._socket.send_multipart((HEADER, body), zmq.NOBLOCK, copy=True)
        except zmq.Again:
            self.refused += 1
            return False
        return True

    def close(self, linger_ms: int = 0) -> None:
        self._socket.close(linger=linger_ms)


def scheduler_address(run_dir: str) -> str:
    """Where the scheduler reads. ``run_dir`` is the private folder of the process tree."""
    return f"ipc://{run_dir}/scheduler.sock"


def frontend_address(run_dir: str, index: int) -> str:
    """Where frontend ``index`` reads."""
    return f"ipc://{run_dir}/frontend-{index}.sock"


def supervisor_address(run_dir: str) -> str:
    """Where the supervisor reads."""
    return f"ipc://{run_dir}/supervisor.sock"
