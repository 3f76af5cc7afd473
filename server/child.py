"""Starting the processes of the tree: a private start document, a cleaned environment, and
death with the parent. Knows nothing of what the children do."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)
# Names of variables that hold secrets, and ours, which may hold the API key.
_PRIVATE = re.compile(
    r"^DUOGRAPH_|(^|_)(KEY|APIKEY|TOKEN|SECRET|SECRETS|PASSWORD|PASSWD|CREDENTIALS?|AUTH)(_|$)"
)


def die_with_parent() -> None:
    """Asks the kernel to kill this process when its parent dies. Survives exec."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def clean_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """What a child may know of ``environ``: no secret, none of our own variables, and no
    leave to ask the model hub for anything."""
    kept = {name: value for name, value in environ.items() if not _PRIVATE.search(name.upper())}
    return kept | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}


@dataclass
class Child:
    """One running process of the tree."""

    role: str  # "scheduler", "frontend 0", ...
    process: subprocess.Popen[bytes]
    signals_sent: list[int] = field(default_factory=list)

    @property
    def pid(self) -> int:
        return self.process.pid

    def exit_code(self) -> int | None:
        """None while it runs; negative for a signal. Reaps it."""
        return self.process.poll()

    def send(self, number: int) -> None:
        """A signal, unless the process has ended."""
        if self.process.poll() is None:
            self.signals_sent.append(number)
            self.process.send_signal(number)

    def death_notice(self) -> str:
        """How it ended, in words; only after exit_code() gave one."""
        code = self.process.returncode
        if code is None or code >= 0:
            return f"the {self.role} process ended with exit code {code}"
        name = signal.Signals(-code).name
        hint = " (as the kernel does when memory is short)" if -code == signal.SIGKILL else ""
        return f"the {self.role} process was killed by {name}{hint}"


def start_child(
    role: str,
    module: str,
    config: Any,
    *,
    environ: Mapping[str, str],
    keep_fds: Sequence[int] = (),
) -> Child:
    """Runs ``python -m module --config-fd N``; N reads ``config`` as one JSON document.

    The document goes through memory only: it may hold the API key, which must be in no command
    line, environment or file. The child gets a process group of its own, so that Ctrl-C in a
    terminal reaches the supervisor alone.
    """
    config_fd = os.memfd_create("duograph-config")
    try:
        os.write(config_fd, msgspec.json.encode(config))
        os.lseek(config_fd, 0, os.SEEK_SET)
        process = subprocess.Popen(
            [sys.executable, "-m", module, "--config-fd", str(config_fd)],
            stdin=subprocess.DEVNULL,
            env=clean_environment(environ),
            pass_fds=(config_fd, *keep_fds),
            process_group=0,
            preexec_fn=die_with_parent,
        )
    finally:
        os.close(config_fd)
    return Child(role, process)
