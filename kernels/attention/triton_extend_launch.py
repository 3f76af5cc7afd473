"""Launches the extend kernel, once a layer and outside of any graph, so that a short step is as
long as these launches take the host: 10 us each, where Triton's own way takes 25 to 40.

The layers of a step differ in addresses only. The first one is launched through a ``Launcher``; a
layer whose tensors are laid out as those of the one before needs four addresses and the launch.
Knows no pages and no batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton

from duograph.kernels.attention.base import AttentionMetadata
from duograph.kernels.attention.triton_extend import extend_kernel
from duograph.kernels.attention.triton_plan import MIN_DOT_ROWS, TileConfig, default_extend_tile
from duograph.kernels.launch import ALIGNMENT, Grid, Launcher, Variant, layout

_LOG2_E = math.log2(math.e)


@dataclass(frozen=True, slots=True)
class _Step:
    """What the layers of one step launch alike.

    Attributes:
        meta: the step's own, which keeps the tensors in ``metadata`` alive.
        like: the scale and the layouts of q, the pool and out that it is good for.
        metadata: addresses.
        scalars: all arguments behind the tensors.
    """

    meta: AttentionMetadata
    like: tuple[Any, ...]
    grid: Grid
    metadata: tuple[int, ...]
    scalars: tuple[Any, ...]
    variant: Variant


class ExtendLauncher:
    """Arguments are those of ``AttentionBackend.extend``, which have been checked."""

    def __init__(
        self,
        *,
        num_kv_heads: int,
        group: int,
        head_dim: int,
        tile: TileConfig | None = None,
        launcher: Launcher | None = None,
    ) -> None:
        """``group``: query heads of one KV head. ``tile`` overrides the default one."""
        self._num_kv_heads = num_kv_heads
        self._group = group
        self._head_dim = head_dim
        self._block_d = max(MIN_DOT_ROWS, triton.next_power_of_2(head_dim))
        self._tile = tile
        self._launch = launcher or Launcher(extend_kernel)
        self._prepared: AttentionMetadata | None = None
        self._step: _Step | None = None  # of what is prepared

    def prepare(self, meta: AttentionMetadata) -> None:
        """A step begins. Until the next one, nothing of ``meta`` changes that a launch reads."""
        self._prepared = meta
        self._step = None

    def again(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        meta: AttentionMetadata,
        out: torch.Tensor,
        scale: float,
    ) -> bool:
        """Launches a layer like the one before, and says whether it is one."""
        step = self._step
        if step is None or step.meta is not meta:
            return False
        if step.like != _like(scale, q, k_cache, v_cache, out):
            return False
        q_at, k_at, v_at = q.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr()
        out_at = out.data_ptr()
        if (q_at | k_at | v_at | out_at) % ALIGNMENT:
            return False
        args = (q_at, k_at, v_at, *step.metadata, out_at, *step.scalars)
        return step.variant.launch(step.grid, args)

    def first(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        meta: AttentionMetadata,
        out: torch.Tensor,
        scale: float,
    ) -> None:
        """Launches a layer of which nothing is known yet.

        Raises:
            ValueError: ``meta`` has no ``query_start_loc``.
        """
        if meta.query_start_loc is None:
            raise ValueError("extend needs AttentionMetadata.query_start_loc")
        metadata = (meta.page_table, meta.req_pool_indices, meta.seq_lens, meta.query_start_loc)
        tensors = (q, k_cache, v_cache, *metadata, out)
        rows = meta.max_extend_len * self._group
        tile = self._tile or default_extend_tile(self._head_dim, q.dtype, rows)
        heads, blocks = (self._group, self._head_dim), (self._block_d, tile.block_m, tile.block_n)
        constexprs = (*heads, *blocks, meta.page_size)
        strides = [n for tensor in (q, k_cache, v_cache, out) for n in tensor.stride()[:2]]
        strides.append(meta.page_table.stride(0))
        options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
        key = (
            tuple([tensor.dtype for tensor in tensors]),
            tuple(strides),
            constexprs,
            *options.values(),
        )
        grid = (self._num_kv_heads, triton.cdiv(rows, tile.block_m), meta.seq_lens.shape[0])
        real = q.shape[0] if meta.num_real_tokens is None else meta.num_real_tokens
        scalars = (*strides, real, scale * _LOG2_E, *constexprs)
        self._launch(
            grid, (*tensors, *scalars), key=key, aligned=(q, k_cache, v_cache, out), **options
        )
        variant = self._launch.kept(key) if meta is self._prepared else None
        # Tensors elsewhere are for Triton to look at, every time.
        if variant is None or any(tensor.get_device() != variant.device for tensor in tensors):
            return
        addresses = tuple([tensor.data_ptr() for tensor in metadata])
        like = _like(scale, q, k_cache, v_cache, out)
        self._step = _Step(meta, like, grid, addresses, scalars, variant)


def _like(scale: float, *tensors: torch.Tensor) -> tuple[Any, ...]:
    return (scale, *[layout(tensor) for tensor in tensors])
