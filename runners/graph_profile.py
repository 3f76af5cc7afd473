"""``--enable-profile-cuda-graph``: a profile of the captures and of one replay of each phase.

Every profile becomes two files of a new folder: a Chrome trace and a table of operations by their
own time, the longest first. A profiler records CPU work of the thread that it is started on only,
hence ``call``. This file knows no runner.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

logger = logging.getLogger(__name__)

TABLE_ROWS = 100

Call = Callable[[Callable[[], None]], None]
"""Runs the work it is given where the profiled work runs, and waits for it."""


def call_here(work: Callable[[], None]) -> None:
    work()


class GraphProfile:
    """Attributes:
    folder: where the files are; made on construction, in the folder for temporary files.
    """

    def __init__(self, device: torch.device) -> None:
        """Raises OSError."""
        self._on_cuda = device.type == "cuda"
        self.folder = Path(tempfile.mkdtemp(prefix="duograph-graph-profile-"))

    @contextmanager
    def record(self, name: str, call: Call = call_here) -> Iterator[None]:
        """Profiles the block and writes ``name``.trace.json.gz and ``name``.txt.

        Raises:
            OSError: a file cannot be written.
        """
        activities = [ProfilerActivity.CPU]
        if self._on_cuda:
            activities.append(ProfilerActivity.CUDA)
        recorder = profile(activities=activities)
        call(recorder.start)
        try:
            yield
            if self._on_cuda:
                torch.cuda.synchronize()
        finally:
            call(recorder.stop)
        recorder.export_chrome_trace(str(self.folder / f"{name}.trace.json.gz"))
        time = "self_device_time_total" if self._on_cuda else "self_cpu_time_total"
        table = recorder.key_averages().table(sort_by=time, row_limit=TABLE_ROWS)
        (self.folder / f"{name}.txt").write_text(table)

    def announce(self) -> None:
        logger.info("Graph profile: traces and tables of captures and replays in %s", self.folder)
