"""The capture loop that both graph runners share: largest first, counted, logged, and going on
without a size for which there is no memory.

This file knows no phase but the words it is given.
"""

from __future__ import annotations

import gc
import logging
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from tqdm import tqdm

from duograph.runners.graph import is_out_of_memory
from duograph.runners.memory import GIB, available_bytes

logger = logging.getLogger(__name__)

_LINES_WITHOUT_TERMINAL = 4  # per phase

Progress = Callable[[str, int, int], None]
"""Called with the phase, sizes done and sizes in all."""


@dataclass(slots=True)
class SizeStats:
    """One captured size. ``real`` and ``padded`` count rows (decode) or tokens (prefill) over
    all replays; their sum is what the graphs computed."""

    seconds: float
    nbytes: int
    replays: int = 0
    real: int = 0
    padded: int = 0

    def count(self, real: int, size: int) -> None:
        self.replays += 1
        self.real += real
        self.padded += size - real


@dataclass(frozen=True, slots=True)
class Wording:
    """How one phase is called in messages and logs, and the flags that shrink or disable it."""

    phase: str  # of EngineStatus
    title: str  # in "Capture <title> begin"
    unit: str  # "bs" or "num_tokens"
    shrink_flag: str
    disable_flag: str


def capture_largest_first(
    sizes: Iterable[int],
    capture_one: Callable[[int], SizeStats],
    *,
    wording: Wording,
    device: torch.device,
    progress: Progress,
) -> tuple[dict[int, SizeStats], list[int]]:
    """Captures every size.

    Returns:
        The captured sizes, ascending, and those dropped for want of memory.

    Raises:
        CaptureError: the forward cannot be captured at all; adds the flag that disables the
            phase as a note.
    """
    order = sorted(sizes, reverse=True)
    stats: dict[int, SizeStats] = {}
    dropped: list[int] = []
    started, free_before = time.perf_counter(), available_bytes(device)
    logger.info(
        "Capture %s begin. This can take up to several minutes. avail mem=%.2f GB",
        wording.title,
        free_before / GIB,
    )
    logger.info("Capture %s %s %s", wording.title, wording.unit, sorted(order))
    bar = tqdm(order, disable=not sys.stderr.isatty())
    for done, size in enumerate(bar):
        progress(wording.phase, done, len(order))
        _announce(bar, wording, size, done, len(order), device)
        try:
            stats[size] = capture_one(size)
        except (RuntimeError, torch.OutOfMemoryError) as error:
            if not is_out_of_memory(error):
                error.add_note(f"{wording.disable_flag} starts without these graphs")
                raise
            dropped.append(size)
            _warn_dropped(wording, size, device)
    progress(wording.phase, len(order), len(order))
    free_after = available_bytes(device)
    logger.info(
        "Capture %s end. Time elapsed: %.2f s. mem usage=%.2f GB. avail mem=%.2f GB.",
        wording.title,
        time.perf_counter() - started,
        max(0, free_before - free_after) / GIB,
        free_after / GIB,
    )
    return dict(sorted(stats.items())), dropped


def _announce(
    bar: tqdm[int], wording: Wording, size: int, done: int, total: int, device: torch.device
) -> None:
    free = available_bytes(device) / GIB
    text = f"Capturing batches ({wording.unit}={size} avail_mem={free:.2f} GB)"
    bar.set_description(text)
    if bar.disable and done % max(1, total // _LINES_WITHOUT_TERMINAL) == 0:
        logger.info("%s %d/%d", text, done, total)


def _warn_dropped(wording: Wording, size: int, device: torch.device) -> None:
    gc.collect()  # the failed capture's frames; during a start the collector is off
    if device.type == "cuda":
        torch.cuda.empty_cache()
    logger.warning(
        "out of memory while capturing %s %s=%d: going on without it. A smaller "
        "--mem-fraction-static or --max-total-tokens leaves more room for graphs; %s below %d "
        "avoids the attempt.",
        wording.title,
        wording.unit,
        size,
        wording.shrink_flag,
        size,
    )
