"""A real ``duograph serve`` process tree for tests: starts it on a free port, waits with a
deadline, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

import openai
import psutil

SOURCE_ROOT = Path(__file__).parents[2] / ".src"
START_TIMEOUT_S = 240.0
NO_GRAPHS = ("--disable-cuda-graph", "--disable-piecewise-cuda-graph")


def eventually(what: Callable[[], object], timeout_s: float, message: str) -> None:
    """Polls until ``what`` is true; fails with ``message`` at the deadline."""
    deadline = time.monotonic() + timeout_s
    while not what():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout_s} s: {message}")
        time.sleep(0.02)


class ServerProcess:
    """A context manager: the tree is killed at exit, if it is still there."""

    def __init__(
        self,
        arguments: Sequence[str],
        folder: Path,
        *,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        """``folder`` gets the log. Servers of one folder have one parent for run folders; it
        is not inside, because names of sockets must be short."""
        name = hashlib.sha256(str(folder).encode()).hexdigest()[:12]
        self.run_parent = Path(f"/tmp/dg-test-{name}")
        self.run_parent.mkdir(mode=0o700, exist_ok=True)
        self._log_path = folder / f"log-{time.monotonic_ns()}"
        variables = {
            **os.environ,
            "PYTHONPATH": str(SOURCE_ROOT),
            "XDG_RUNTIME_DIR": str(self.run_parent),
            "OMP_NUM_THREADS": "1",
            **(environ or {}),
        }
        command = [sys.executable, "-m", "duograph.server", *arguments]
        with open(self._log_path, "wb") as log:
            self.process = subprocess.Popen(
                command, env=variables, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        self._seen: list[psutil.Process] = []

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None:
            print(self.log())
        members = self.members()
        self.process.kill()
        for member in members:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
        self.process.wait(30)
        shutil.rmtree(self.run_parent, ignore_errors=True)  # a successor may have done it

    # What it says

    def log(self) -> str:
        return self._log_path.read_text(errors="replace")

    @property
    def port(self) -> int:
        match = re.search(r"Listening on http://\S+:(\d+)", self.log())
        assert match, self.log()
        return int(match[1])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def get(self, path: str, timeout_s: float = 10.0) -> tuple[int, str]:
        """Status and body; status 0 if nobody answers."""
        try:
            with urllib.request.urlopen(self.url + path, timeout=timeout_s) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except OSError as error:
            return 0, str(error)

    def metric(self, name: str) -> float:
        """The sum of a metric's samples over all labels."""
        status, page = self.get("/metrics")
        assert status == 200, page
        pattern = rf"^{re.escape(name)}(?:{{[^}}]*}})? (\S+)$"
        values = re.findall(pattern, page, re.MULTILINE)
        assert values, f"no metric {name} in:\n{page}"
        return sum(map(float, values))

    def settled_metric(self, name: str, quiet_s: float = 1.2) -> float:
        """The value once it has not changed for two publishing intervals of the engine."""
        value, since = self.metric(name), time.monotonic()
        deadline = since + 30
        while time.monotonic() - since < quiet_s:
            assert time.monotonic() < deadline, f"{name} never settles"
            time.sleep(0.1)
            latest = self.metric(name)
            if latest != value:
                value, since = latest, time.monotonic()
        return value

    def client(self, api_key: str = "none") -> openai.OpenAI:
        return openai.OpenAI(
            base_url=f"{self.url}/v1", api_key=api_key, max_retries=0, timeout=120.0
        )

    # What it does

    def wait_ready(self, timeout_s: float = START_TIMEOUT_S) -> ServerProcess:
        def ready() -> bool:
            assert self.process.poll() is None, f"ended while starting:\n{self.log()}"
            if "ready to roll" not in self.log():
                return False
            status, body = self.get("/ready")
            return status == 200 and json.loads(body)["ready"] is True

        eventually(ready, timeout_s, "ready")
        self._seen = psutil.Process(self.process.pid).children(recursive=True)
        return self

    def members(self) -> list[psutil.Process]:
        """The children that still live (zombies do not)."""
        try:
            children = psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            children = []
        known = {child.pid: child for child in [*self._seen, *children]}
        return [child for child in known.values() if _lives(child)]

    def member(self, title: str) -> psutil.Process:
        """The child whose process title holds ``title``."""
        found = [child for child in self.members() if title in " ".join(child.cmdline())]
        assert len(found) == 1, [child.cmdline() for child in self.members()]
        return found[0]

    def send(self, number: int) -> None:
        self.process.send_signal(number)

    def wait(self, timeout_s: float) -> int:
        return self.process.wait(timeout_s)

    def stop(self) -> int:
        self.send(signal.SIGTERM)
        return self.wait(60)

    def assert_nothing_left(self, timeout_s: float = 5.0) -> None:
        """No process, no run folder, no open port."""
        eventually(lambda: not self.members(), timeout_s, "all children gone")
        assert list(self.run_parent.iterdir()) == []
        assert self.get("/health")[0] == 0


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
