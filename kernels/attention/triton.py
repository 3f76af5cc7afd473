"""Plan-free paged attention for CUDA: the backend around ``triton_kernels``.

The kernels read lengths, request rows and page ids on the device, so one captured graph serves
every later step and nothing is planned on the host. This file chooses launch shapes from
host-known shapes alone and owns the scratch. It knows no batch, request, layer or graph.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton

from duograph.kernels.attention.base import AttentionMetadata
from duograph.kernels.attention.triton_kernels import decode_kernel, extend_kernel, join_kernel
from duograph.kernels.pdl import pdl_launch

_LOG2_E = math.log2(math.e)
_JOIN_HEADS = 8  # of one program, where sequences have few splits
_MIN_DOT_ROWS = 16  # smallest tile edge tl.dot takes
_MAX_SPLITS = 64
_MIN_CHUNK = 128  # tokens; below this a split costs more than it hides
_LONG_CHUNK = 2048  # tokens; chunk when only very long sequences are split


@dataclass(frozen=True, slots=True)
class TileConfig:
    """Launch shape of one kernel. ``block_m`` (query rows) is fixed by the group in decode."""

    block_n: int  # keys per step of the loop
    num_warps: int
    num_stages: int  # depth of the load pipeline
    block_m: int = _MIN_DOT_ROWS


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


def default_decode_tile(head_dim: int, dtype: torch.dtype) -> TileConfig:
    """Keeps one K and V stage within 32 KiB, so that two or more programs fit an SM. 64 keys, not
    128, of 64 dimensions: batch 256 at 128 tokens took 29 us instead of 38 on one H200."""
    row_bytes = triton.next_power_of_2(head_dim) * dtype.itemsize
    block_n = max(16, min(64, 16384 // row_bytes))
    return TileConfig(block_n=block_n, num_warps=4, num_stages=3)


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


class TritonBackend:
    """The ``AttentionBackend`` for any CUDA card, and the reference for faster ones.

    Takes bf16, fp16 and fp32 (fp32 at full precision), any head_dim up to 256 and any page
    size. Scratch of the split decode is allocated at the first, uncaptured, call of the largest
    batch size and lives as long as the backend, because captured graphs hold its address.
    """

    name = "triton"

    def __init__(
        self,
        *,
        num_q_heads: int,
        num_kv_heads: int,
        head_dim: int,
        device: torch.device,
        target_programs: int | None = None,
        decode_tile: TileConfig | None = None,
        extend_tile: TileConfig | None = None,
    ) -> None:
        """``target_programs`` and the tiles override what is derived from the device.

        Raises:
            ValueError: the heads do not divide, or head_dim is out of range.
        """
        if num_q_heads % num_kv_heads:
            raise ValueError(
                f"num_q_heads {num_q_heads} is not a multiple of num_kv_heads {num_kv_heads}"
            )
        if not 1 <= head_dim <= 256:
            raise ValueError(f"head_dim {head_dim} is not in [1, 256]")
        self.num_q_heads = num_q_heads
        self.num_kv_heads = num_kv_heads
        self.group = num_q_heads // num_kv_heads
        self.head_dim = head_dim
        self.device = torch.device(device)
        if target_programs is None:
            target_programs = 2 * _multiprocessors(self.device)
        self.target_programs = target_programs
        self._decode_tile = decode_tile
        self._extend_tile = extend_tile
        # Outgrown buffers stay alive: a captured graph may still write to them.
        self._scratch: list[torch.Tensor] = []

    def prepare(self, meta: AttentionMetadata) -> None:
        """Nothing to plan: everything is read on the device."""

    def decode(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        meta: AttentionMetadata,
        out: torch.Tensor,
        scale: float,
    ) -> None:
        """One query row per sequence; see ``AttentionBackend.decode``."""
        self._check(q, k_cache, v_cache, meta, out)
        bs = meta.seq_lens.shape[0]
        tile = self._decode_tile or default_decode_tile(self.head_dim, q.dtype)
        max_len = meta.page_table.shape[1] * meta.page_size
        plan = plan_splits(bs * self.num_kv_heads, max_len, self.target_programs)
        partial, lse = self._partials(bs, plan.num_splits)
        block_d = max(_MIN_DOT_ROWS, triton.next_power_of_2(self.head_dim))
        shared = {
            "HEAD_DIM": self.head_dim,
            "BLOCK_D": block_d,
            "BLOCK_N": tile.block_n,
        }
        decode_kernel[(self.num_kv_heads, bs, plan.num_splits)](
            q,
            k_cache,
            v_cache,
            meta.page_table,
            meta.req_pool_indices,
            meta.seq_lens,
            out,
            partial,
            lse,
            *q.stride()[:2],
            *k_cache.stride()[:2],
            *v_cache.stride()[:2],
            *out.stride()[:2],
            meta.page_table.stride(0),
            plan.num_splits,
            plan.min_chunk,
            scale * _LOG2_E,
            GROUP=self.group,
            BLOCK_G=max(_MIN_DOT_ROWS, triton.next_power_of_2(self.group)),
            PAGE_SIZE=meta.page_size,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
            **pdl_launch(self.device),
            **shared,
        )
        if plan.num_splits > 1:
            # Many splits mean few programs: there each head has one of its own.
            heads = 1 if plan.num_splits > 8 else _JOIN_HEADS
            join_kernel[(triton.cdiv(self.num_q_heads, heads), bs)](
                partial,
                lse,
                meta.seq_lens,
                out,
                *out.stride()[:2],
                plan.num_splits,
                plan.min_chunk,
                NUM_Q_HEADS=self.num_q_heads,
                BLOCK_S=triton.next_power_of_2(plan.num_splits),
                BLOCK_H=heads,
                num_warps=4,
                **pdl_launch(self.device),
                **shared,
            )

    def extend(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        meta: AttentionMetadata,
        out: torch.Tensor,
        scale: float,
    ) -> None:
        """Causal attention over prefix and new rows; see ``AttentionBackend.extend``."""
        self._check(q, k_cache, v_cache, meta, out)
        if meta.query_start_loc is None:
            raise ValueError("extend needs AttentionMetadata.query_start_loc")
        rows = meta.max_extend_len * self.group
        tile = self._extend_tile or default_extend_tile(self.head_dim, q.dtype, rows)
        real = q.shape[0] if meta.num_real_tokens is None else meta.num_real_tokens
        blocks = triton.cdiv(rows, tile.block_m)
        extend_kernel[(self.num_kv_heads, blocks, meta.seq_lens.shape[0])](
            q,
            k_cache,
            v_cache,
            meta.page_table,
            meta.req_pool_indices,
            meta.seq_lens,
            meta.query_start_loc,
            out,
            *q.stride()[:2],
            *k_cache.stride()[:2],
            *v_cache.stride()[:2],
            *out.stride()[:2],
            meta.page_table.stride(0),
            real,
            scale * _LOG2_E,
            GROUP=self.group,
            HEAD_DIM=self.head_dim,
            BLOCK_D=max(_MIN_DOT_ROWS, triton.next_power_of_2(self.head_dim)),
            BLOCK_M=tile.block_m,
            BLOCK_N=tile.block_n,
            PAGE_SIZE=meta.page_size,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )

    def _partials(self, bs: int, num_splits: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Scratch for the normalised partial outputs [bs, heads, splits, dim] and their base-2
        log-sum-exps [bs, heads, splits], both float32 views of one buffer."""
        cells = bs * self.num_q_heads * num_splits if num_splits > 1 else 0
        size = cells * (self.head_dim + 1)
        if not self._scratch or self._scratch[-1].numel() < size:
            # Splits fall as batches grow, so this bound holds for the usual batch sizes and the
            # first decode call is normally the only allocation.
            floor = 2 * self.target_programs * self.group * (self.head_dim + 1)
            self._scratch.append(
                torch.empty(max(size, floor), dtype=torch.float32, device=self.device)
            )
        flat = self._scratch[-1]
        split = cells * self.head_dim
        return flat[:split], flat[split:size]

    def _check(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        meta: AttentionMetadata,
        out: torch.Tensor,
    ) -> None:
        want = (self.num_q_heads, self.head_dim)
        if tuple(q.shape[1:]) != want or out.shape != q.shape:
            raise ValueError(
                f"q and out must be [num_tokens, {want[0]}, {want[1]}], "
                f"got {tuple(q.shape)} and {tuple(out.shape)}"
            )
        if tuple(k_cache.shape[1:]) != (self.num_kv_heads, self.head_dim):
            raise ValueError(
                f"k_cache must be [num_slots, {self.num_kv_heads}, {self.head_dim}], "
                f"got {tuple(k_cache.shape)}"
            )
        last = (q.stride(2), out.stride(2), k_cache.stride(2), v_cache.stride(2))
        if last != (1, 1, 1, 1) or meta.page_table.stride(1) != 1:
            raise ValueError("the last dimension of q, out, the pool and page_table must be dense")


def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":  # Triton's interpreter
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
