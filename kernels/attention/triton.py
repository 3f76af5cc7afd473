"""Plan-free paged attention for CUDA: the backend around the Triton kernels.

The kernels read lengths, request rows and page ids on the device, so one captured graph serves
every later step and nothing is planned on the host. This file launches them and owns the
scratch. It knows no batch, request, layer or graph.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton

from duograph.kernels.attention.base import AttentionMetadata
from duograph.kernels.attention.fused_decode import Rotary
from duograph.kernels.attention.triton_decode import decode_kernel
from duograph.kernels.attention.triton_extend_launch import ExtendLauncher
from duograph.kernels.attention.triton_fused_decode import fused_decode_kernel
from duograph.kernels.attention.triton_plan import (
    MIN_DOT_ROWS,
    TileConfig,
    default_decode_tile,
    max_fused_rows,
    plan_splits,
)
from duograph.kernels.pdl import pdl_launch

_LOG2_E = math.log2(math.e)


@dataclass(frozen=True, slots=True)
class _DecodeLaunch:
    """What both decode kernels take alike."""

    tile: TileConfig
    grid: tuple[int, int, int]
    metadata: tuple[torch.Tensor, ...]  # page table, request rows, lengths
    scratch: tuple[torch.Tensor, ...]  # partial results, their log-sum-exps, arrivals
    splits: tuple[int, int, float]  # number, least tokens, base-2 scale of the logits
    options: dict[str, Any]


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
        self.max_fused_rows = max_fused_rows(head_dim)
        self.device = torch.device(device)
        if target_programs is None:
            target_programs = 2 * _multiprocessors(self.device)
        self.target_programs = target_programs
        self._decode_tile = decode_tile
        self._extend = ExtendLauncher(
            num_kv_heads=num_kv_heads, group=self.group, head_dim=head_dim, tile=extend_tile
        )
        # Outgrown buffers stay alive: a captured graph may still write to them.
        self._scratch: list[torch.Tensor] = []
        self._arrived: list[torch.Tensor] = []

    def prepare(self, meta: AttentionMetadata) -> None:
        """Nothing to plan: everything is read on the device. What the layers of an extend step
        launch alike is worked out by the first of them."""
        self._extend.prepare(meta)

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
        launch = self._decode_launch(q, meta, scale, fused=False)
        decode_kernel[launch.grid](
            q,
            k_cache,
            v_cache,
            out,
            *launch.metadata,
            *launch.scratch,
            *q.stride()[:2],
            *k_cache.stride()[:2],
            *v_cache.stride()[:2],
            *out.stride()[:2],
            meta.page_table.stride(0),
            *launch.splits,
            EARLY=launch.tile.early,
            **launch.options,
        )

    def decode_fused(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        rotary: Rotary,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        meta: AttentionMetadata,
        out: torch.Tensor,
        scale: float,
    ) -> None:
        """See ``FusedDecode.decode_fused``. head_dim is even."""
        self._check(q, k_cache, v_cache, meta, out)
        want = (q.shape[0], self.num_kv_heads, self.head_dim)
        if tuple(k.shape) != want or tuple(v.shape) != want or self.head_dim % 2:
            raise ValueError(
                f"k and v must be [num_tokens, {want[1]}, {want[2]}] with an even head_dim, "
                f"got {tuple(k.shape)} and {tuple(v.shape)}"
            )
        if (k.stride(2), v.stride(2), rotary.cos_sin.stride(1)) != (1, 1, 1):
            raise ValueError("the last dimension of k, v and cos_sin must be dense")
        launch = self._decode_launch(q, meta, scale, fused=True)
        fused_decode_kernel[launch.grid](
            q,
            k,
            v,
            k_cache,
            v_cache,
            out,
            *launch.metadata,
            rotary.positions,
            meta.out_cache_loc,
            rotary.cos_sin,
            q if rotary.q_norm is None else rotary.q_norm,
            k if rotary.k_norm is None else rotary.k_norm,
            *launch.scratch,
            *q.stride()[:2],
            *k.stride()[:2],
            *v.stride()[:2],
            *k_cache.stride()[:2],
            *v_cache.stride()[:2],
            *out.stride()[:2],
            meta.page_table.stride(0),
            rotary.cos_sin.stride(0),
            rotary.eps,
            *launch.splits,
            NORM=rotary.q_norm is not None,
            **launch.options,
        )

    def _decode_launch(
        self, q: torch.Tensor, meta: AttentionMetadata, scale: float, *, fused: bool
    ) -> _DecodeLaunch:
        bs = meta.seq_lens.shape[0]
        tile = self._decode_tile or default_decode_tile(self.head_dim, q.dtype, bs, fused=fused)
        max_len = meta.page_table.shape[1] * meta.page_size
        plan = plan_splits(bs * self.num_kv_heads, max_len, self.target_programs)
        return _DecodeLaunch(
            tile=tile,
            grid=(self.num_kv_heads, bs, plan.num_splits),
            metadata=(meta.page_table, meta.req_pool_indices, meta.seq_lens),
            scratch=(*self._partials(bs, plan.num_splits), self._counters(bs)),
            splits=(plan.num_splits, plan.min_chunk, scale * _LOG2_E),
            options={
                "GROUP": self.group,
                "BLOCK_G": max(MIN_DOT_ROWS, triton.next_power_of_2(self.group)),
                "HEAD_DIM": self.head_dim,
                "BLOCK_D": max(MIN_DOT_ROWS, triton.next_power_of_2(self.head_dim)),
                "BLOCK_N": tile.block_n,
                "PAGE_SIZE": meta.page_size,
                "num_warps": tile.num_warps,
                "num_stages": tile.num_stages,
                **pdl_launch(self.device),
            },
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
        if not self._extend.again(q, k_cache, v_cache, meta, out, scale):
            self._check(q, k_cache, v_cache, meta, out)
            self._extend.first(q, k_cache, v_cache, meta, out, scale)

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

    def _counters(self, bs: int) -> torch.Tensor:
        """int32 [bs, kv_heads], zeros: programs that arrived. The kernel leaves them at zero."""
        size = bs * self.num_kv_heads
        if not self._arrived or self._arrived[-1].numel() < size:
            self._arrived.append(torch.zeros(size, dtype=torch.int32, device=self.device))
        return self._arrived[-1]

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
