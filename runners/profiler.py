"""One torch profile of some steps at a time, written as a Chrome trace.

The profiler only sees the thread that it was started on, so starting and stopping go through
``call``, which runs something where the steps run. It ends by itself after MAX_PROFILED_STEPS
steps: a profile that is forgotten must not fill the memory. Knows no request.
"""

from __future__ import annotations

import logging
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from duograph.runners.config import MAX_PROFILED_STEPS

logger = logging.getLogger(__name__)


class ProfilerError(RuntimeError):
    """Nothing to stop, something that runs already, or a folder that cannot be written."""


class StepProfiler:
    """``call(work)`` runs ``work`` on the thread that launches steps, and waits for it."""

    def __init__(self, folder: str | None, call: Callable[[Callable[[], None]], None]) -> None:
        """``folder`` None is the system's folder for temporary files."""
        self._folder = Path(folder or tempfile.gettempdir())
        self._call = call
        self._profile: Any = None  # torch.profiler.profile while it runs
        self._steps = 0
        self._last = MAX_PROFILED_STEPS
        self._writer: threading.Thread | None = None

    def start(self, steps: int = MAX_PROFILED_STEPS) -> str:
        """Begins; ends after ``steps`` steps, MAX_PROFILED_STEPS at most. Raises ProfilerError."""
        if not 1 <= steps <= MAX_PROFILED_STEPS:
            raise ProfilerError(f"a profile takes 1 to {MAX_PROFILED_STEPS} steps, not {steps}")
        if self._profile is not None:
            raise ProfilerError("a profile is running; stop it first")
        if not self._folder.is_dir():
            raise ProfilerError("the folder of --profile-dir does not exist")
        from torch import profiler

        activities = [profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(profiler.ProfilerActivity.CUDA)
        profile = profiler.profile(activities=activities)
        self._call(profile.start)
        self._profile, self._steps, self._last = profile, 0, steps
        return f"profiling the next {steps} steps"

    def step(self) -> None:
        """One more step has been launched."""
        if self._profile is None:
            return
        self._steps += 1
        if self._steps >= self._last:
            logger.info("Profile: %s", self.stop())

    def stop(self) -> str:
        """Ends the profile and has its file written behind the caller's back. Raises
        ProfilerError."""
        profile, self._profile = self._profile, None
        if profile is None:
            raise ProfilerError("no profile is running; start one first")
        self._call(profile.stop)
        path = self._folder / f"duograph-{time.time_ns()}.trace.json"
        self.join()
        self._writer = threading.Thread(target=_write, args=(profile, path), name="profile")
        self._writer.start()
        return f"{self._steps} steps, being written to {path}"

    def join(self) -> None:
        """Waits until the last file is complete."""
        if self._writer is not None:
            self._writer.join()


def _write(profile: Any, path: Path) -> None:
    part = path.with_suffix(".part")
    try:
        profile.export_chrome_trace(str(part))
        part.rename(path)
    except (OSError, RuntimeError) as error:
        logger.error("the profile cannot be written to %s: %s", path, error)
