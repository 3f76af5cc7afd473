"""How the Triton attention kernels are launched: tiles and splits, from host-known shapes alone.

What is measured here was measured on one H200 (tests/benchmarks/h200.md). Knows no tensor.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

MIN_DOT_ROWS = 16  # smallest tile edge tl.dot takes
MAX_FUSED_ROWS = 32  # of a fused decode; above, its registers cost more than a launch
_MAX_SPLITS = 64
# Tokens; below this a split costs more than it hides: at 136 tokens and 8 to 32 sequences, one
# program of 256 took 2 to 5 us less than two of 128 and their join.
_MIN_CHUNK = 256
_LONG_CHUNK = 2048  # tokens; chunk when only very long sequences are split


@dataclass(frozen=True, slots=True)
class TileConfig:
    """Launch shape of one kernel. ``block_m`` (query rows) is fixed by the group in decode."""

    block_n: int  # keys per step of the loop
    num_warps: int
    num_stages: int  # depth of the load pipeline
    block_m: int = MIN_DOT_ROWS
    early: bool = False  # decode: tiles wait in registers; the fused kernel always does it


@dataclass(frozen=True, slots=True)
class SplitPlan:
    """How decode cuts sequences: at most ``num_splits`` chunks of at least ``min_chunk``."""

    num_splits: int
    min_chunk: int


def plan_splits(programs: int, max_len: int, target_programs: int) -> SplitPlan:
    """Chooses the split of one batch size from host-known shapes only.

    Args:
        programs: sequences times KV heads, the programs there are without splitting.
        max_len: longest sequence the page table can describe, in tokens.
        target_programs: programs that fill the device.
    """
    wanted = triton.cdiv(target_programs, programs)
    if wanted >= 2:
        fitting = triton.cdiv(max_len, _MIN_CHUNK)
        return SplitPlan(max(1, min(wanted, fitting, _MAX_SPLITS)), _MIN_CHUNK)
    # The batch fills the device, but one very long sequence would still run alone at the end.
    return SplitPlan(max(1, min(4, max_len // (2 * _LONG_CHUNK))), _LONG_CHUNK)


def max_fused_rows(head_dim: int) -> int:
    """The largest batch at which the fused decode is the faster way. With 128 dimensions its
    tiles fill so many registers that it is only at one row, where launches cost the most."""
    return MAX_FUSED_ROWS if head_dim <= 64 else 1


def default_decode_tile(head_dim: int, dtype: torch.dtype, bs: int, *, fused: bool) -> TileConfig:
    """A step of keys within 16 KiB, so that two or more programs fit an SM, and 64 keys at most:
    batch 256 at 128 tokens took 29 us instead of 38 with 128 keys of 64 dimensions. Large
    batches hide their loads by number and need the registers; from 9 to 32 rows early loads
    took 2 us less a layer."""
    row_bytes = triton.next_power_of_2(head_dim) * dtype.itemsize
    if fused and bs == 1:  # few programs: each takes as much at once as it can
        return TileConfig(block_n=max(16, min(128, 16384 // row_bytes)), num_warps=8, num_stages=3)
    step_bytes = 16384 if fused or bs <= MAX_FUSED_ROWS else 8192
    block_n = max(16, min(64, step_bytes // row_bytes))
    early = 8 < bs <= MAX_FUSED_ROWS
    return TileConfig(block_n=block_n, num_warps=4, num_stages=3, early=early)


def default_extend_tile(head_dim: int, dtype: torch.dtype, rows: int) -> TileConfig:
    """``rows``: query rows, group included, of the longest sequence in the step."""
    if dtype.itemsize > 2:
        return TileConfig(block_m=32, block_n=32, num_warps=4, num_stages=1)
    if head_dim > 128:
        return TileConfig(block_m=128, block_n=32, num_warps=8, num_stages=2)
    # Measured on one H200 at 32/8 heads: 512 tokens (2048 rows) are too few tiles of 128, and of
    # 64 dimensions 4 warps a tile are 5 to 10 % faster than 8.
    if rows <= 4096:
        return TileConfig(block_m=64, block_n=64, num_warps=4, num_stages=3)
    num_warps = 4 if head_dim <= 64 else 8
    return TileConfig(block_m=128, block_n=64, num_warps=num_warps, num_stages=3)
