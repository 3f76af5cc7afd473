"""The private folder that holds the sockets of one process tree.

A folder lives as long as its lock is held. The kernel lets go of the lock when the supervisor
dies, however it dies, so a later start can tell stale folders from living ones without
trusting process ids, which are reused and differ between containers that share a folder.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

PREFIX = "duograph-run-"
LOCK_NAME = "lock"
# sockaddr_un holds 107 characters; the longest name below the folder is supervisor.sock
LONGEST_FOLDER = 107 - len("/frontend-99.sock")


class RunFolder:
    """Owner of one fresh 0700 folder. A context manager: the folder is gone at exit."""

    def __init__(self, parent: Path) -> None:
        """Raises OSError if nothing can be made in ``parent``."""
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=parent))
            flags = os.O_CREAT | os.O_RDWR | os.O_CLOEXEC
            self._lock = os.open(self.path / LOCK_NAME, flags, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            if os.fstat(self._lock).st_nlink > 0:
                return
            os.close(self._lock)  # swept between open and flock: try again

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def parent_folder(environ: Mapping[str, str]) -> Path:
    """The user's runtime folder if there is one, else the temporary folder. Socket names have
    a length limit, so a deep folder is passed over for /tmp."""
    for candidate in (environ.get("XDG_RUNTIME_DIR", ""), tempfile.gettempdir(), "/tmp"):
        room = len(candidate) + len(f"/{PREFIX}4194304-12345678") <= LONGEST_FOLDER
        if candidate.startswith("/") and room and os.access(candidate, os.W_OK | os.X_OK):
            return Path(candidate)
    raise OSError("neither XDG_RUNTIME_DIR, TMPDIR nor /tmp can be written")


def sweep_stale(parent: Path) -> list[Path]:
    """Deletes the folders of supervisors that are gone. Returns what it deleted."""
    return [folder for folder in sorted(parent.glob(f"{PREFIX}*")) if _swept(folder)]


def _swept(folder: Path) -> bool:
    try:
        status = folder.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
            return False
        lock = os.open(folder / LOCK_NAME, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False  # gone meanwhile, not ours, or so young that it has no lock yet
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    except BlockingIOError:
        return False
    finally:
        os.close(lock)
    return True
