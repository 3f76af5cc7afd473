"""Signals as data: a queue that the supervisor's loop reads, so that no handler ever
interrupts it half-way through its bookkeeping."""

from __future__ import annotations

import contextlib
import signal
import socket
from collections.abc import Iterator
from types import FrameType

END_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Interrupted(BaseException):
    """The user ended the start before there was anything to drain."""


class SignalQueue:
    """Numbers of the signals that came since the last read, in order. Its file descriptor is
    readable when there are some, or when another thread has called ``wake``."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        for number in (*END_SIGNALS, signal.SIGCHLD):
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup keeps SIGHUP ignored
                signal.signal(number, _do_nothing)

    def fileno(self) -> int:
        return self._reader.fileno()

    def wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # full means that it is readable anyway
            self._writer.send(b"\0")

    def take(self) -> list[int]:
        numbers: list[int] = []
        while True:
            try:
                chunk = self._reader.recv(4096)
            except BlockingIOError:
                return [number for number in numbers if number != 0]
            numbers.extend(chunk)

    def close(self) -> None:
        signal.set_wakeup_fd(-1)
        self._reader.close()
        self._writer.close()


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Inside, an end signal raises Interrupted: for the blocking work before the start."""
    previous = {}
    for number in END_SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            previous[number] = signal.signal(number, _interrupt)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _do_nothing(number: int, frame: FrameType | None) -> None:
    """The wake-up descriptor carries the number; Python only needs some handler."""


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise Interrupted
