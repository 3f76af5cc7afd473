"""A step's inputs, from the block of numbers that the host has made to where kernels find them:
the static buffers of graphs and the tables by request row.

The block holds what only the host knows; positions, KV slots and the rest follow from it where
they are needed. Triton on CUDA, which reads the block over the bus where it lies in page-locked
memory; numpy elsewhere. Plain tensors only: this file knows no request and no batch.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

Ints = npt.NDArray[np.int64]

ROW_INTS = 3  # of a request that has taken a row: the row, and what goes to Tables.ints
ROW_FLOATS = 6  # likewise to Tables.floats


class Layout(NamedTuple):
    """A block's sections, in order, in words of 8 bytes:

    rows [bs], lengths [bs], pages [pages], and in an extend step lengths before the step [bs],
    first query rows and their sum [bs + 1], first page of each [bs]; page updates
    [page_updates, 3] (row, column, page); row inits, [row_inits, ROW_INTS] integers and
    [row_inits, ROW_FLOATS] float64; in an extend step the token ids [tokens].

    ``pages`` are those that the step writes to: one a row in decode; in an extend step those of
    each sequence from its first new token's on.
    """

    sequences: int
    pages: int
    tokens: int  # 0 in decode
    page_updates: int
    row_inits: int

    @property
    def updates_at(self) -> int:
        extend = 3 * self.sequences + 1 if self.tokens else 0
        return 2 * self.sequences + self.pages + extend

    @property
    def inits_at(self) -> int:
        return self.updates_at + 3 * self.page_updates

    @property
    def floats_at(self) -> int:
        return self.inits_at + ROW_INTS * self.row_inits

    @property
    def tokens_at(self) -> int:
        return self.floats_at + ROW_FLOATS * self.row_inits

    @property
    def words(self) -> int:
        return self.tokens_at + self.tokens


class Tables(NamedTuple):
    """By request row, R of them."""

    page_table: torch.Tensor  # int32 [R, columns]
    ints: torch.Tensor  # int64 [ROW_INTS - 1, R]
    floats: torch.Tensor  # float32 [ROW_FLOATS, R]
    next_tokens: torch.Tensor  # int64 [R]


class DecodeTargets(NamedTuple):
    """Written to their ``padded`` first elements."""

    rows: torch.Tensor  # int64
    seq_lens: torch.Tensor  # int32
    input_ids: torch.Tensor  # int64, from Tables.next_tokens
    positions: torch.Tensor  # int64
    out_cache_loc: torch.Tensor  # int64


class ExtendTargets(NamedTuple):
    """The first four by sequence, the others by token; those are padded."""

    rows: torch.Tensor  # int64
    seq_lens: torch.Tensor  # int32
    query_start_loc: torch.Tensor  # int32, one more than sequences
    last_rows: torch.Tensor  # int64, the last query row of each
    input_ids: torch.Tensor  # int64
    positions: torch.Tensor  # int64
    out_cache_loc: torch.Tensor  # int64


def load_decode(
    words: torch.Tensor,
    layout: Layout,
    tables: Tables,
    targets: DecodeTargets,
    *,
    padded: int,
    page_size: int,
) -> None:
    """Applies the block's updates to ``tables`` and writes ``targets``. Rows from the batch's to
    ``padded`` are of the dummy: row 0, length 1, token ``next_tokens[0]``, position 0, slot 0."""
    if tables.page_table.is_cuda:
        from duograph.kernels import step_inputs_triton

        step_inputs_triton.load_decode(
            words, layout, tables, targets, padded=padded, page_size=page_size
        )
        return
    block, size = words.numpy(), layout.sequences
    _update(block, layout, tables)
    rows, lens, pages = (block[i * size : (i + 1) * size] for i in range(3))
    _put(targets.rows, rows, padded, 0)
    _put(targets.seq_lens, lens, padded, 1)
    _put(targets.positions, lens - 1, padded, 0)
    _put(targets.out_cache_loc, pages * page_size + (lens - 1) % page_size, padded, 0)
    torch.index_select(tables.next_tokens, 0, targets.rows[:padded], out=targets.input_ids[:padded])


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
    """As ``load_decode``; ``padded`` counts tokens, and those behind the batch's are token 0 at
    position 0, slot 0. ``longest``: tokens of the longest sequence in the step, or more."""
    if tables.page_table.is_cuda:
        from duograph.kernels import step_inputs_triton

        step_inputs_triton.load_extend(
            words,
            layout,
            tables,
            targets,
            longest=longest,
            padded=padded,
            page_size=page_size,
        )
        return
    block, size = words.numpy(), layout.sequences
    _update(block, layout, tables)
    at = 2 * size + layout.pages
    rows, lens, starts = block[:size], block[size : 2 * size], block[at : at + size]
    query_start = block[at + size : at + 2 * size + 1]
    _put(targets.rows, rows, size, 0)
    _put(targets.seq_lens, lens, size, 0)
    _put(targets.query_start_loc, query_start, size + 1, 0)
    _put(targets.last_rows, query_start[1:] - 1, size, 0)
    positions, slots = token_places(lens, starts, block[2 * size : at], page_size)
    _put(targets.input_ids, block[layout.tokens_at : layout.words], padded, 0)
    _put(targets.positions, positions, padded, 0)
    _put(targets.out_cache_loc, slots, padded, 0)


def token_places(seq_lens: Ints, starts: Ints, pages: Ints, page_size: int) -> tuple[Ints, Ints]:
    """Position and KV slot of each token of an extend step, int64 [tokens] both.

    ``pages``: of each sequence, one sequence after the other, from the page of position
    ``starts[i]`` to that of ``seq_lens[i] - 1``. slot = page * page_size + position % page_size.
    """
    lens = seq_lens - starts
    # Position of token i of the step: its index, moved by what its sequence's own start is off.
    positions = np.arange(lens.sum()) + np.repeat(starts - (np.cumsum(lens) - lens), lens)
    # Likewise for its page.
    first = starts // page_size
    columns = (seq_lens - 1) // page_size - first + 1
    at = positions // page_size + np.repeat((np.cumsum(columns) - columns) - first, lens)
    return positions, pages[at] * page_size + positions % page_size


def _update(block: Ints, layout: Layout, tables: Tables) -> None:
    updates = block[layout.updates_at : layout.inits_at].reshape(-1, 3)
    tables.page_table.numpy()[updates[:, 0], updates[:, 1]] = updates[:, 2]
    ints = block[layout.inits_at : layout.floats_at].reshape(-1, ROW_INTS)
    floats = block[layout.floats_at : layout.tokens_at].view(np.float64)
    tables.ints.numpy()[:, ints[:, 0]] = ints[:, 1:].T
    tables.floats.numpy()[:, ints[:, 0]] = floats.reshape(-1, ROW_FLOATS).T


def _put(target: torch.Tensor, values: Ints, padded: int, fill: int) -> None:
    array = target.numpy()
    array[: len(values)] = values
    array[len(values) : padded] = fill
