"""Device tables with one row per running request.

A step names rows, and the device finds pages, the last token and sampling parameters there,
so that a decode step uploads one small block and never the requests' state. Row 0 is the
dummy request that padding uses: page 0, token 0, greedy. This file knows no policy: which
request has which row is the scheduler's business.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from duograph.kernels.bitmask import bitmask_words
from duograph.kernels.step_inputs import Tables
from duograph.runners.batch import RowInit
from duograph.runners.sampling_params import SamplingParams
from duograph.runners.step_inputs import float_params
from duograph.runners.upload import upload

DUMMY_ROW = 0


class RequestTable:
    """The tables; R = ``max_running_requests`` + 1 rows, V = vocabulary.

    Attributes:
        page_table: int32 [R, max_pages].
        next_tokens: int64 [R], written by the sampler of one step, read by the next.
        temperature, top_p, min_p: float32 [R].
        top_k: int64 [R], -1 = off.
        seed: int64 [R].
        presence, frequency, repetition: float32 [R], penalties.
        prompt_mask: bool [R, V], tokens of the prompt; output_counts: int32 [R, V]. Rows of
            requests without penalties hold leftovers and are never read.
        bitmask: int32 [R, words], where the masks of one step's constrained rows lie, from the
            first on; not by row.
    """

    def __init__(
        self, *, max_running_requests: int, max_pages: int, vocab_size: int, device: torch.device
    ) -> None:
        rows = max_running_requests + 1

        def table(fill: float, dtype: torch.dtype, *shape: int) -> torch.Tensor:
            return torch.full((rows, *shape), fill, dtype=dtype, device=device)

        self.device = device
        self.num_rows = rows
        self.vocab_size = vocab_size
        self.page_table = table(0, torch.int32, max_pages)
        self.next_tokens = table(0, torch.int64)
        fresh = torch.tensor(float_params(SamplingParams(temperature=0.0)), dtype=torch.float32)
        self._floats = fresh[:, None].repeat(1, rows).to(device)
        self.temperature, self.top_p, self.min_p = self._floats[:3]
        self.presence, self.frequency, self.repetition = self._floats[3:]
        self._ints = torch.tensor([[-1] * rows, [0] * rows], dtype=torch.int64, device=device)
        self.top_k, self.seed = self._ints
        self.prompt_mask = table(False, torch.bool, vocab_size)
        self.output_counts = table(0, torch.int32, vocab_size)
        self.bitmask = table(0, torch.int32, bitmask_words(vocab_size))

    @property
    def nbytes(self) -> int:
        found = [value for value in vars(self).values() if isinstance(value, torch.Tensor)]
        return sum(tensor.nbytes for tensor in found if tensor._base is None)

    @property
    def tables(self) -> Tables:
        """What a step's inputs are written to (kernels/step_inputs.py)."""
        return Tables(self.page_table, self._ints, self._floats, self.next_tokens)

    def init_counts(self, row_inits: Sequence[RowInit]) -> None:
        """What penalties need of the rows that were taken. Doing it again changes nothing."""
        for init in row_inits:
            if init.sampling.needs_penalty:
                self._init_counts(init)

    def _init_counts(self, init: RowInit) -> None:
        self.prompt_mask[init.row].zero_()
        self.output_counts[init.row].zero_()
        if init.prompt_ids:
            # not by indexing: `mask[row, ids] = True` waits for the device
            ids = self._upload(init.prompt_ids, torch.int64)
            self.prompt_mask[init.row].index_fill_(0, ids, True)
        if init.output_ids:
            ids = self._upload(init.output_ids, torch.int64)
            self.output_counts[init.row].index_add_(0, ids, torch.ones_like(ids, dtype=torch.int32))

    def _upload(self, values: list[int] | list[list[float]], dtype: torch.dtype) -> torch.Tensor:
        return upload(values, dtype, self.device)
