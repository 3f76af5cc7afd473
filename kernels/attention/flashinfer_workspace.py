"""How much scratch FlashInfer's planners may ask for. Knows no tensor: only counts.

Its planners raise when a plan does not fit, so these are upper bounds of what they reserve
(``PrefillPlan`` and ``DecodePlan`` in its scheduler.cuh, version 0.6).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

_BLOCKS_PER_SM = 2  # that the FA2 planner fills
_MAX_BLOCKS_PER_SM = 32  # that the kernel without tensor cores can fill
_PREFILL_TILE = 128  # query rows, heads of a group counted as rows
_FLOAT = 4  # bytes


@dataclass(frozen=True, slots=True)
class Scratch:
    """``sms``: multiprocessors of the card."""

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    sms: int

    @property
    def group(self) -> int:
        return self.num_q_heads // self.num_kv_heads

    def decode_tiles(self, bs: int) -> tuple[int, int]:
        """Work items of the largest FA2 plan of ``bs`` sequences in a CUDA graph, and query rows
        of one."""
        rows = 16 if self.group <= 16 else 64 if self.group <= 64 else _PREFILL_TILE
        tiles = math.ceil(bs * self.group / rows) + bs
        return max(_BLOCKS_PER_SM * self.sms // self.num_kv_heads + 1, tiles), rows

    def decode_float_bytes(self, bs: int) -> int:
        """Partial outputs and their sums, float32."""
        tiles, rows = self.decode_tiles(bs)
        return tiles * rows * self.num_q_heads * (self.head_dim + 1) * _FLOAT + 4096

    def decode_int_bytes(self, bs: int) -> int:
        """Three numbers and a flag of each work item, two of each sequence; twice that. The
        kernel without tensor cores has its work items by multiprocessor."""
        tiles, _ = self.decode_tiles(bs)
        return 2 * (16 * (tiles + _MAX_BLOCKS_PER_SM * self.sms) + 8 * bs)

    def extend_float_bytes(self) -> int:
        """FA2 splits the keys of few query rows; FA3 never does and asks for nothing."""
        rows = _BLOCKS_PER_SM * self.sms * self.group * _PREFILL_TILE
        return rows * (self.head_dim + 1) * _FLOAT + 4096
