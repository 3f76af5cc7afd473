"""Which sizes are captured, and which captured size a batch is padded to.

Schedules (sizes in requests for decode, in tokens for prefill):

    decode, CUDA    1 2 4 8 12; 16..256 step 8; 272..496 step 16; 512.. step 32
    decode, CPU     1 2 4 8 16 ... doubling
    prefill, CUDA   4..32 step 4; 48..256 step 16; 288..512 step 32; 576..1024 step 64;
                    1280..4096 step 256; 4608.. step 512
    prefill, CPU    16 64 128 256 512 1024 2048 ... doubling

The maximum is always in the list, also where the stride would jump over it. A recorded graph
saves no time on CPU and each size costs one real forward at start, hence the short lists
there. This file knows sizes only: no tensor, no runner.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from itertools import chain


def get_batch_sizes_to_capture(
    max_bs: int, *, device_type: str = "cuda", disable_padding: bool = False
) -> tuple[int, ...]:
    """Decode batch sizes, ascending, up to and always including ``max_bs``.

    Args:
        max_bs: largest decode batch, already clipped to the running limit.
        device_type: ``"cuda"`` or ``"cpu"``.
        disable_padding: every size, because without padding only exact sizes are replayed.

    Raises:
        ValueError: ``max_bs`` is below 1.
    """
    if disable_padding:
        return _with_maximum(range(1, max_bs + 1), max_bs)
    if device_type == "cpu":
        return _with_maximum(_doubling(1, max_bs), max_bs)
    return _with_maximum(
        chain(
            (1, 2, 4, 8, 12),
            range(16, 257, 8),
            range(272, 497, 16),
            range(512, max_bs + 1, 32),
        ),
        max_bs,
    )


def get_token_levels_to_capture(max_tokens: int, *, device_type: str = "cuda") -> tuple[int, ...]:
    """Prefill token levels, ascending, up to and always including ``max_tokens``.

    Raises:
        ValueError: ``max_tokens`` is below 1.
    """
    if device_type == "cpu":
        return _with_maximum(chain((16,), _doubling(64, max_tokens)), max_tokens)
    return _with_maximum(
        chain(
            range(4, 33, 4),
            range(48, 257, 16),
            range(288, 513, 32),
            range(576, 1025, 64),
            range(1280, 4097, 256),
            range(4608, max_tokens + 1, 512),
        ),
        max_tokens,
    )


def clip_sizes(sizes: Iterable[int], limit: int) -> tuple[int, ...]:
    """Sizes a user asked for, sorted and unique, with ``limit`` in place of larger ones."""
    return tuple(sorted({min(size, limit) for size in sizes}))


def padded_size(sizes: tuple[int, ...], size: int) -> int | None:
    """The smallest of the ascending ``sizes`` that holds ``size``; None above the largest."""
    index = bisect_left(sizes, size)
    return sizes[index] if index < len(sizes) else None


def _doubling(start: int, limit: int) -> list[int]:
    sizes = []
    size = start
    while size <= limit:
        sizes.append(size)
        size *= 2
    return sizes


def _with_maximum(schedule: Iterable[int], maximum: int) -> tuple[int, ...]:
    if maximum < 1:
        raise ValueError(f"the largest size to capture must be at least 1, got {maximum}")
    return tuple(sorted({size for size in schedule if size <= maximum} | {maximum}))
