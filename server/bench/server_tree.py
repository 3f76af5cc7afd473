"""A ``duograph serve`` process tree under measurement: started, watched, and ended.

Knows processes and the log's words; knows no request.
"""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

import psutil

START_TIMEOUT_S = 600.0
END_TIMEOUT_S = 60.0
LAST_LINES = 8
_LISTENING = re.compile(r"Listening on (http://[^\s\"]+)")  # of a text or a JSON line
_READY = "The server is fired up and ready to roll!"


class ServerTreeError(RuntimeError):
    """The server did not start or has ended; the text holds its last lines."""


class ServerTree:
    """A context manager; ``url`` and the processes are there once it is entered."""

    def __init__(
        self, flags: Sequence[str], log: Path, *, environ: Mapping[str, str] | None = None
    ) -> None:
        """``log`` gets what the server says; ``environ`` stands for this process's own."""
        self._environ = environ
        self._flags = list(flags)
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None
        self._members: dict[str, psutil.Process] = {}
        self.url = ""
        self.ready_s = 0.0

    def __enter__(self) -> ServerTree:
        command = [sys.executable, "-m", "duograph.server", *self._flags]
        started = time.monotonic()
        with open(self._log, "wb") as file:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=self._environ
            )
        try:
            while _READY not in (text := self._text()):
                self.check_alive()
                if time.monotonic() - started > START_TIMEOUT_S:
                    raise ServerTreeError(f"not ready in {START_TIMEOUT_S:g} s:\n{self._tail()}")
                time.sleep(0.1)
            self.ready_s = time.monotonic() - started
            found = _LISTENING.search(text)
            if found is None:
                raise ServerTreeError(f"the server does not say where it listens:\n{self._tail()}")
            self.url = found[1]
            self._members = self._find_members()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._end()

    def names(self) -> list[str]:
        """Such as "supervisor", "scheduler", "frontend 0"."""
        return list(self._members)

    def line_with(self, words: str) -> str:
        """The first line of the log that holds ``words``; empty if there is none."""
        return next((line for line in self._text().splitlines() if words in line), "")

    def cpu_seconds(self) -> dict[str, float]:
        """User and system time of each process since its start. Raises ServerTreeError."""
        found = {}
        for name, process in self._members.items():
            try:
                times = process.cpu_times()
            except psutil.Error as error:
                raise ServerTreeError(f"the {name} process is gone:\n{self._tail()}") from error
            found[name] = times.user + times.system
        return found

    def check_alive(self) -> None:
        """Raises ServerTreeError if the server has ended."""
        assert self._process is not None
        code = self._process.poll()
        if code is not None:
            raise ServerTreeError(f"the server ended with exit code {code}:\n{self._tail()}")

    def _find_members(self) -> dict[str, psutil.Process]:
        assert self._process is not None
        top = psutil.Process(self._process.pid)
        found = {"supervisor": top}
        for child in top.children():
            with contextlib.suppress(psutil.Error):  # a helper of a compiler that has ended
                title = " ".join(child.cmdline()).strip()
                if title.startswith("duograph: "):
                    found[title.removeprefix("duograph: ")] = child
        return found

    def _text(self) -> str:
        return self._log.read_text(errors="replace")

    def _tail(self) -> str:
        return "\n".join(self._text().splitlines()[-LAST_LINES:])

    def _end(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            # twice: the second one ends it at once
            self._process.send_signal(signal.SIGTERM)
            self._process.wait(END_TIMEOUT_S)
