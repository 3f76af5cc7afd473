"""What a step brings to the device, as one block of host memory.

Every copy to the device costs the host some microseconds and the device a change of engines, so
a step has one block: it is copied as a whole, or read over the bus where it lies, if that is
page-locked memory. The sections are views of it, on the host and on the device alike. This file
knows no runner and no kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from duograph.runners.sampling_params import SamplingParams

Array = npt.NDArray[np.integer]


class Layout(NamedTuple):
    """How long the sections of a block are."""

    sequences: int
    tokens: int
    is_extend: bool
    page_updates: int
    row_inits: int

    def sizes(self) -> list[int]:
        """In words of 8 bytes, in the order of ``views``."""
        extend = int(self.is_extend)
        return [
            self.sequences,
            self.tokens,
            self.tokens,
            _words(self.sequences),
            extend * self.tokens,
            extend * self.sequences,
            extend * _words(self.sequences + 1),
            _words(3 * self.page_updates),
            3 * self.row_inits,
            3 * self.row_inits,
        ]

    def views(self, words: torch.Tensor) -> StepInputs:
        """``words``: int64, as long as the sum of ``sizes``."""
        rows, positions, slots, lens, ids, last, starts, pages, ints, floats = torch.split(
            words, self.sizes()
        )
        extend, updates, inits = self.is_extend, self.page_updates, self.row_inits
        return StepInputs(
            words=words,
            layout=self,
            req_pool_indices=rows,
            positions=positions,
            out_cache_loc=slots,
            seq_lens=lens.view(torch.int32)[: self.sequences],
            input_ids=ids if extend else None,
            last_rows=last if extend else None,
            query_start_loc=starts.view(torch.int32)[: self.sequences + 1] if extend else None,
            page_updates=_matrix(pages.view(torch.int32), updates) if updates else None,
            row_ints=_matrix(ints, inits) if inits else None,
            row_floats=floats.view(torch.float32).view(6, inits) if inits else None,
        )


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The tensors of one step, all of them views of ``words``.

    Attributes:
        words: int64, the block.
        req_pool_indices: int64 [bs], row of the request table.
        positions, out_cache_loc: int64 [num_tokens].
        seq_lens: int32 [bs], length including this step's tokens.
        input_ids: int64 [num_tokens]; None in decode, as are the two that follow.
        last_rows: int64 [bs], the last query row of each sequence.
        query_start_loc: int32 [bs + 1], the first query row of each, and their sum.
        page_updates: int32 [3, n] or None: row, column, page; applied before the step.
        row_ints: int64 [3, m] or None, of the requests that have taken a row: row, top_k, seed.
        row_floats: float32 [6, m] or None: temperature, top_p, min_p, presence, frequency and
            repetition penalty of the same.
    """

    words: torch.Tensor
    layout: Layout
    req_pool_indices: torch.Tensor
    positions: torch.Tensor
    out_cache_loc: torch.Tensor
    seq_lens: torch.Tensor
    input_ids: torch.Tensor | None
    last_rows: torch.Tensor | None
    query_start_loc: torch.Tensor | None
    page_updates: torch.Tensor | None
    row_ints: torch.Tensor | None
    row_floats: torch.Tensor | None

    @staticmethod
    def pack(
        rows: Array,
        seq_lens: Array,
        positions: Array,
        out_cache_loc: Array,
        *,
        input_ids: Array | None = None,
        extend_lens: Sequence[int] = (),
        page_updates: Array | None = None,
        row_inits: Sequence[tuple[int, SamplingParams]] = (),
        pinned: bool = False,
    ) -> StepInputs:
        """Arrays of any integer type; see the attributes.

        Args:
            extend_lens: tokens of each sequence, with ``input_ids``.
            row_inits: the rows taken, with the parameters of their requests.
            pinned: put the block into page-locked memory. It comes from torch's caching host
                allocator, which hands one out again only when the copies from it have run; who
                lets a kernel read it has to keep it until then.
        """
        sections = [rows, positions, out_cache_loc, _halves(seq_lens)]
        if input_ids is not None:
            starts = np.zeros(len(rows) + 1, np.int64)
            np.cumsum(extend_lens, out=starts[1:])
            sections += [input_ids, starts[1:] - 1, _halves(starts)]
        if page_updates is not None:
            sections.append(_halves(page_updates.ravel()))
        if row_inits:
            sections += _row_sections(row_inits)
        updates = 0 if page_updates is None else page_updates.shape[1]
        layout = Layout(len(rows), len(positions), input_ids is not None, updates, len(row_inits))
        words = torch.empty(sum(layout.sizes()), dtype=torch.int64, pin_memory=pinned)
        np.concatenate(sections, out=words.numpy(), casting="same_kind")
        return layout.views(words)

    def to(self, device: torch.device) -> StepInputs:
        """The same on ``device``, by one copy that does not wait."""
        if self.words.device.type == device.type:
            return self
        return self.layout.views(self.words.to(device, non_blocking=True))

    def readable_by(self, device: torch.device) -> StepInputs:
        """What kernels on ``device`` can read: this, if it is there or in page-locked memory."""
        on_host = self.words.device.type == "cpu" and device.type != "cpu"
        return self.to(device) if on_host and not self.words.is_pinned() else self


def _halves(values: Array) -> Array:
    """``values`` as 4-byte integers, two in a word of 8."""
    words = np.zeros(_words(len(values)), np.int64)
    words.view(np.int32)[: len(values)] = values
    return words


def _row_sections(row_inits: Sequence[tuple[int, SamplingParams]]) -> list[Array]:
    """``row_ints`` and ``row_floats``."""
    params = [sampling for _, sampling in row_inits]
    ints = [[row for row, _ in row_inits], [p.top_k for p in params], [p.seed for p in params]]
    floats = np.array(float_columns(params), np.float32)
    return [np.array(ints, np.int64).ravel(), floats.ravel().view(np.int64)]


def float_columns(params: Sequence[SamplingParams]) -> list[list[float]]:
    """temperature, top_p, min_p, presence, frequency and repetition of each request."""
    return [
        [p.temperature for p in params],
        [p.top_p for p in params],
        [p.min_p for p in params],
        [p.presence_penalty for p in params],
        [p.frequency_penalty for p in params],
        [p.repetition_penalty for p in params],
    ]


def _words(halves: int) -> int:
    """Of 8 bytes, for ``halves`` of 4."""
    return (halves + 1) // 2


def _matrix(flat: torch.Tensor, columns: int) -> torch.Tensor:
    return flat[: 3 * columns].view(3, columns)
