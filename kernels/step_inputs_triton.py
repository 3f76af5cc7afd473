"""Triton bodies of ``step_inputs.py``. None knows of dependent launches: what follows one of
them, and may read before it waits for the kernel before it, starts when it has ended (pdl.py)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from duograph.kernels.launch import Launcher
from duograph.kernels.step_inputs import (
    ROW_FLOATS,
    ROW_INTS,
    DecodeTargets,
    ExtendTargets,
    Layout,
    Tables,
)

_BLOCK = 1024


def load_decode(
    words: torch.Tensor,
    layout: Layout,
    tables: Tables,
    targets: DecodeTargets,
    *,
    padded: int,
    page_size: int,
) -> None:
    """See ``step_inputs.load_decode``. ``words`` on the device or in page-locked memory, where
    it has to stay until the device has got there."""
    _launch_decode(
        (2, 1, 1),
        (words, *tables, *targets, *_numbers(layout, tables), padded, *_shape(page_size)),
        key=(tables.page_table.device, page_size),
        aligned=(),
        num_warps=8,
    )


def load_extend(
    words: torch.Tensor,
    layout: Layout,
    tables: Tables,
    targets: ExtendTargets,
    *,
    longest: int,
    padded: int,
    page_size: int,
) -> None:
    """See ``step_inputs.load_extend``; ``words`` as in ``load_decode``."""
    blocks = -(-max(longest, padded - layout.tokens) // _BLOCK)
    _launch_extend(
        (layout.sequences + 2, blocks, 1),
        (
            words,
            *tables[:3],
            *targets,
            *_numbers(layout, tables),
            layout.tokens,
            padded,
            *_shape(page_size),
        ),
        key=(tables.page_table.device, page_size),
        aligned=(),
        num_warps=8,
    )


def to_host(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copies an int64 vector to page-locked memory of the host, by a kernel: one that follows
    starts some microseconds earlier than behind a copy engine. Complete once an event recorded
    behind it is."""
    count = len(source)
    _launch_copy(
        (-(-count // _BLOCK), 1, 1),
        (source, target, count, _BLOCK),
        key=source.device,
        aligned=(),
        num_warps=8,
    )


def _numbers(layout: Layout, tables: Tables) -> tuple[int, ...]:
    return (
        layout.sequences,
        layout.pages,
        layout.page_updates,
        layout.row_inits,
        layout.updates_at,
        tables.page_table.stride(0),
        tables.ints.stride(0),
    )


def _shape(page_size: int) -> tuple[int, ...]:
    return page_size, ROW_INTS, ROW_FLOATS, _BLOCK


_POINTERS = [
    "words",
    "page_table",
    "row_ints",
    "row_floats",
    "next_tokens",
    "rows_out",
    "lens_out",
    "query_start_out",
    "last_out",
    "ids_out",
    "positions_out",
    "slots_out",
]
_NUMBERS = [
    "sequences",
    "pages",
    "updates",
    "inits",
    "updates_at",
    "table_stride",
    "row_stride",
    "tokens",
    "padded",
]


# One variant for all: layouts differ from step to step, and a block lies anywhere.
_jit = triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_POINTERS)


@triton.jit
def _update_tables(
    words: tl.tensor,
    page_table: tl.tensor,
    row_ints: tl.tensor,
    row_floats: tl.tensor,
    updates: tl.tensor,
    inits: tl.tensor,
    updates_at: tl.tensor,
    table_stride: tl.tensor,
    row_stride: tl.tensor,
    INTS: tl.constexpr,
    FLOATS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    for first in range(0, updates, BLOCK):
        places = first + tl.arange(0, BLOCK)
        inside = places < updates
        update = words + updates_at + 3 * places
        row = tl.load(update, mask=inside, other=0)
        column = tl.load(update + 1, mask=inside, other=0)
        page = tl.load(update + 2, mask=inside, other=0)
        tl.store(page_table + row * table_stride + column, page.to(tl.int32), mask=inside)
    ints = words + updates_at + 3 * updates
    floats = (ints + INTS * inits).to(tl.pointer_type(tl.float64))
    for first in range(0, inits, BLOCK):
        places = first + tl.arange(0, BLOCK)
        inside = places < inits
        row = tl.load(ints + INTS * places, mask=inside, other=0)
        for i in tl.static_range(INTS - 1):
            number = tl.load(ints + INTS * places + 1 + i, mask=inside, other=0)
            tl.store(row_ints + i * row_stride + row, number, mask=inside)
        for i in tl.static_range(FLOATS):
            score = tl.load(floats + FLOATS * places + i, mask=inside, other=0.0)
            tl.store(row_floats + i * row_stride + row, score.to(tl.float32), mask=inside)


@_jit
def _load_decode_kernel(
    words: tl.tensor,
    page_table: tl.tensor,
    row_ints: tl.tensor,
    row_floats: tl.tensor,
    next_tokens: tl.tensor,
    rows_out: tl.tensor,
    lens_out: tl.tensor,
    ids_out: tl.tensor,
    positions_out: tl.tensor,
    slots_out: tl.tensor,
    sequences: tl.tensor,
    pages: tl.tensor,
    updates: tl.tensor,
    inits: tl.tensor,
    updates_at: tl.tensor,
    table_stride: tl.tensor,
    row_stride: tl.tensor,
    padded: tl.tensor,
    PAGE_SIZE: tl.constexpr,
    INTS: tl.constexpr,
    FLOATS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Grid (2,): the rows of the batch; the tables."""
    if tl.program_id(0) == 1:
        _update_tables(
            words,
            page_table,
            row_ints,
            row_floats,
            updates,
            inits,
            updates_at,
            table_stride,
            row_stride,
            INTS,
            FLOATS,
            BLOCK,
        )
        return
    for first in range(0, padded, BLOCK):
        places = first + tl.arange(0, BLOCK)
        real = places < sequences
        inside = places < padded
        row = tl.load(words + places, mask=real, other=0)
        length = tl.load(words + sequences + places, mask=real, other=1)
        page = tl.load(words + 2 * sequences + places, mask=real, other=0)
        position = length - 1
        tl.store(rows_out + places, row, mask=inside)
        tl.store(lens_out + places, length.to(tl.int32), mask=inside)
        tl.store(positions_out + places, position, mask=inside)
        tl.store(slots_out + places, page * PAGE_SIZE + position % PAGE_SIZE, mask=inside)
        tl.store(ids_out + places, tl.load(next_tokens + row, mask=inside, other=0), mask=inside)


@_jit
def _load_extend_kernel(
    words: tl.tensor,
    page_table: tl.tensor,
    row_ints: tl.tensor,
    row_floats: tl.tensor,
    rows_out: tl.tensor,
    lens_out: tl.tensor,
    query_start_out: tl.tensor,
    last_out: tl.tensor,
    ids_out: tl.tensor,
    positions_out: tl.tensor,
    slots_out: tl.tensor,
    sequences: tl.tensor,
    pages: tl.tensor,
    updates: tl.tensor,
    inits: tl.tensor,
    updates_at: tl.tensor,
    table_stride: tl.tensor,
    row_stride: tl.tensor,
    tokens: tl.tensor,
    padded: tl.tensor,
    PAGE_SIZE: tl.constexpr,
    INTS: tl.constexpr,
    FLOATS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Grid (sequences + 2, blocks of tokens): the tokens of each sequence; the padding; the
    tables and what there is by sequence."""
    which = tl.program_id(0)
    places = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    starts = words + 2 * sequences + pages
    query_starts = starts + sequences
    if which < sequences:
        begin = tl.load(query_starts + which)
        inside = places < tl.load(query_starts + which + 1) - begin
        start = tl.load(starts + which)
        position = start + places
        column = position // PAGE_SIZE - start // PAGE_SIZE
        sequence_pages = words + 2 * sequences + tl.load(query_starts + sequences + 1 + which)
        page = tl.load(sequence_pages + column, mask=inside, other=0)
        ids = words + updates_at + 3 * updates + (INTS + FLOATS) * inits + begin
        tl.store(ids_out + begin + places, tl.load(ids + places, mask=inside), mask=inside)
        tl.store(positions_out + begin + places, position, mask=inside)
        slot = page * PAGE_SIZE + position % PAGE_SIZE
        tl.store(slots_out + begin + places, slot, mask=inside)
    elif which == sequences:
        nothing = tl.zeros([BLOCK], tl.int64)
        behind = tokens + places < padded
        tl.store(ids_out + tokens + places, nothing, mask=behind)
        tl.store(positions_out + tokens + places, nothing, mask=behind)
        tl.store(slots_out + tokens + places, nothing, mask=behind)
    elif tl.program_id(1) == 0:
        _update_tables(
            words,
            page_table,
            row_ints,
            row_floats,
            updates,
            inits,
            updates_at,
            table_stride,
            row_stride,
            INTS,
            FLOATS,
            BLOCK,
        )
        for first in range(0, sequences + 1, BLOCK):
            each = first + tl.arange(0, BLOCK)
            inside = each < sequences
            end = tl.load(query_starts + each, mask=each <= sequences, other=0)
            tl.store(query_start_out + each, end.to(tl.int32), mask=each <= sequences)
            tl.store(last_out + each - 1, end - 1, mask=(each > 0) & (each <= sequences))
            tl.store(rows_out + each, tl.load(words + each, mask=inside), mask=inside)
            length = tl.load(words + sequences + each, mask=inside)
            tl.store(lens_out + each, length.to(tl.int32), mask=inside)


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["source", "target"])
def _copy_kernel(
    source: tl.tensor, target: tl.tensor, count: tl.tensor, BLOCK: tl.constexpr
) -> None:
    """Grid (blocks,)."""
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(source + places, mask=places < count)
    tl.store(target + places, values, mask=places < count)


_launch_decode = Launcher(_load_decode_kernel)
_launch_extend = Launcher(_load_extend_kernel)
_launch_copy = Launcher(_copy_kernel)
