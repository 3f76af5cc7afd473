"""What a step brings to the device, as one block of host memory.

Every tensor that a step brings costs the host some microseconds to make and to send, and the
device a change of engines, so a step has one block of numbers. It holds what only the host knows
and is read where it lies (kernels/step_inputs.py). This file knows no runner.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import numpy as np
import numpy.typing as npt
import torch

from duograph.kernels.step_inputs import Layout
from duograph.runners.sampling_params import SamplingParams

Tokens = npt.NDArray[np.integer]


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The numbers of one step.

    Attributes:
        words: int64, in host memory, pinned if the device is to read it.
        layout: what lies where.
    """

    words: torch.Tensor
    layout: Layout

    @staticmethod
    def decode(
        rows: Sequence[int],
        seq_lens: Sequence[int],
        pages: Sequence[int],
        *,
        page_updates: Sequence[tuple[int, int, int]] = (),
        row_inits: Sequence[tuple[int, SamplingParams]] = (),
        pinned: bool = False,
    ) -> StepInputs:
        """One new token of each sequence.

        Args:
            rows: rows of the request table.
            seq_lens: lengths, the new token included.
            pages: the page of each new token.
            page_updates: row, column and page of new cells of the page table.
            row_inits: the rows taken, with the parameters of their requests.
            pinned: put the block into page-locked memory. It comes from torch's caching host
                allocator, which knows of copies only: who lets a kernel read it has to keep it
                until then.
        """
        layout = Layout(len(rows), len(pages), 0, len(page_updates), len(row_inits))
        words = torch.empty(layout.words, dtype=torch.int64, pin_memory=pinned)
        _fill(words.numpy(), layout, [*rows, *seq_lens, *pages], page_updates, row_inits)
        return StepInputs(words, layout)

    @staticmethod
    def extend(
        rows: Sequence[int],
        seq_lens: Sequence[int],
        pages: Sequence[int],
        *,
        starts: Sequence[int],
        tokens: Sequence[Tokens],
        page_size: int,
        page_updates: Sequence[tuple[int, int, int]] = (),
        row_inits: Sequence[tuple[int, SamplingParams]] = (),
        pinned: bool = False,
    ) -> StepInputs:
        """New tokens of each sequence; see ``decode``.

        Args:
            pages: those written to, of one sequence after the other.
            starts: lengths before the step.
            tokens: the new ones of each sequence.
        """
        ends = list(accumulate(map(len, tokens), initial=0))
        columns = [
            (end - 1) // page_size - start // page_size + 1
            for start, end in zip(starts, seq_lens, strict=True)
        ]
        first_pages = list(accumulate(columns, initial=0))[:-1]
        layout = Layout(len(rows), len(pages), ends[-1], len(page_updates), len(row_inits))
        words = torch.empty(layout.words, dtype=torch.int64, pin_memory=pinned)
        block = words.numpy()
        numbers = [*rows, *seq_lens, *pages, *starts, *ends, *first_pages]
        _fill(block, layout, numbers, page_updates, row_inits)
        np.concatenate(tokens, out=block[layout.tokens_at :], casting="same_kind")
        return StepInputs(words, layout)

    @property
    def is_extend(self) -> bool:
        return self.layout.tokens > 0

    @property
    def rows(self) -> torch.Tensor:
        """int64 [bs], a view."""
        return self.words[: self.layout.sequences]

    @property
    def seq_lens(self) -> torch.Tensor:
        """int64 [bs], a view: lengths including this step's tokens."""
        return self.words[self.layout.sequences : 2 * self.layout.sequences]

    def readable_by(self, device: torch.device) -> torch.Tensor:
        """``words``, or a copy of them on ``device`` if its kernels could not read them."""
        if device.type == "cpu" or self.words.is_pinned():
            return self.words
        return self.words.to(device)


def _fill(
    block: npt.NDArray[np.int64],
    layout: Layout,
    numbers: list[int],
    page_updates: Sequence[tuple[int, int, int]],
    row_inits: Sequence[tuple[int, SamplingParams]],
) -> None:
    """All but the tokens; ``numbers`` are what comes before the updates. As one list: each array
    made costs more than its numbers."""
    numbers += chain.from_iterable(page_updates)
    for row, params in row_inits:
        numbers += (row, params.top_k, params.seed)
    block[: layout.floats_at] = numbers
    if row_inits:
        floats = [number for _, params in row_inits for number in float_params(params)]
        block[layout.floats_at : layout.tokens_at].view(np.float64)[:] = floats


def float_params(params: SamplingParams) -> tuple[float, ...]:
    """temperature, top_p, min_p, presence, frequency and repetition penalty."""
    return (
        params.temperature,
        params.top_p,
        params.min_p,
        params.presence_penalty,
        params.frequency_penalty,
        params.repetition_penalty,
    )
