"""Triton bodies of ``step_inputs.py``. None knows of dependent launches: what follows one of
them, and may read before it waits for the kernel before it, starts when it has ended (pdl.py)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from duograph.kernels.launch import Launcher

_BLOCK = 1024
_MOST_VECTORS = 4


def copy_padded(
    sources: Sequence[torch.Tensor],
    targets: Sequence[torch.Tensor],
    fills: Sequence[int],
    *,
    count: int,
    end: int,
) -> None:
    """See ``step_inputs.copy_padded``.

    Raises:
        ValueError: no vector or more than four.
    """
    vectors = len(sources)
    if not 1 <= vectors <= _MOST_VECTORS:
        raise ValueError(f"copy_padded takes 1 to {_MOST_VECTORS} vectors, got {vectors}")
    if not end:
        return
    missing = _MOST_VECTORS - vectors
    read = (*sources, *(sources[0],) * missing)
    written = (*targets, *(targets[0],) * missing)
    fill = (*fills, *(0,) * missing)
    _launch_copy_padded(
        (vectors, -(-end // _BLOCK), 1),
        (*read, *written, *fill, count, end, _BLOCK),
        key=tuple([tensor.dtype for tensor in (*read, *written)]),
        aligned=(),
        num_warps=8,
    )


def update_pages(updates: torch.Tensor, page_table: torch.Tensor) -> None:
    """See ``step_inputs.update_pages``."""
    count = updates.shape[1]
    _launch_update_pages(
        (-(-count // _BLOCK), 1, 1),
        (updates, page_table, page_table.stride(0), count, _BLOCK),
        key=(updates.dtype, page_table.dtype),
        aligned=(),
        num_warps=8,
    )


def update_rows(
    ints: torch.Tensor, floats: torch.Tensor, int_table: torch.Tensor, float_table: torch.Tensor
) -> None:
    """See ``step_inputs.update_rows``."""
    _launch_update_rows(
        (len(int_table) + len(float_table), 1, 1),
        (ints, floats, int_table, float_table, ints.shape[1], int_table.stride(0), 128),
        key=(ints.dtype, floats.dtype, int_table.dtype, float_table.dtype),
        aligned=(),
    )


@triton.jit(
    do_not_specialize=["f0", "f1", "f2", "f3", "count", "end"],
    do_not_specialize_on_alignment=["s0", "s1", "s2", "s3", "t0", "t1", "t2", "t3"],
)
def _copy_padded_kernel(
    s0: tl.tensor,
    s1: tl.tensor,
    s2: tl.tensor,
    s3: tl.tensor,
    t0: tl.tensor,
    t1: tl.tensor,
    t2: tl.tensor,
    t3: tl.tensor,
    f0: tl.tensor,
    f1: tl.tensor,
    f2: tl.tensor,
    f3: tl.tensor,
    count: tl.tensor,
    end: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Grid (vectors, blocks)."""
    vector = tl.program_id(0)
    if vector == 0:
        _copy_block(s0, t0, f0, count, end, BLOCK)
    elif vector == 1:
        _copy_block(s1, t1, f1, count, end, BLOCK)
    elif vector == 2:
        _copy_block(s2, t2, f2, count, end, BLOCK)
    else:
        _copy_block(s3, t3, f3, count, end, BLOCK)


@triton.jit
def _copy_block(
    source: tl.tensor,
    target: tl.tensor,
    fill: tl.tensor,
    count: tl.tensor,
    end: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    places = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(source + places, mask=places < count, other=0)
    filled = tl.where(places < count, values, fill.to(values.dtype))
    tl.store(target + places, filled, mask=places < end)


@triton.jit(
    do_not_specialize=["count", "stride"],
    do_not_specialize_on_alignment=["updates", "page_table"],
)
def _update_pages_kernel(
    updates: tl.tensor,
    page_table: tl.tensor,
    stride: tl.tensor,
    count: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = places < count
    rows = tl.load(updates + places, mask=inside, other=0).to(tl.int64)
    columns = tl.load(updates + count + places, mask=inside, other=0)
    pages = tl.load(updates + 2 * count + places, mask=inside, other=0)
    tl.store(page_table + rows * stride + columns, pages, mask=inside)


@triton.jit(
    do_not_specialize=["count", "stride"],
    do_not_specialize_on_alignment=["ints", "floats", "int_table", "float_table"],
)
def _update_rows_kernel(
    ints: tl.tensor,
    floats: tl.tensor,
    int_table: tl.tensor,
    float_table: tl.tensor,
    count: tl.tensor,
    stride: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Grid (8,): the two integers of a row, then its six floats."""
    column = tl.program_id(0)
    for first in range(0, count, BLOCK):
        places = first + tl.arange(0, BLOCK)
        inside = places < count
        rows = tl.load(ints + places, mask=inside, other=0)
        if column < 2:
            values = tl.load(ints + (1 + column) * count + places, mask=inside, other=0)
            tl.store(int_table + column * stride + rows, values, mask=inside)
        else:
            scores = tl.load(floats + (column - 2) * count + places, mask=inside, other=0.0)
            tl.store(float_table + (column - 2) * stride + rows, scores, mask=inside)


_launch_copy_padded = Launcher(_copy_padded_kernel)
_launch_update_pages = Launcher(_update_pages_kernel)
_launch_update_rows = Launcher(_update_rows_kernel)
