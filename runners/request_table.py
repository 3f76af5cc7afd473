"""Device tables with one row per running request.

A step names rows, and the device finds pages, the last token and sampling parameters there,
so that a decode step uploads one small block and never the requests' state. Row 0 is the
dummy request that padding uses: page 0, token 0, greedy. This file knows no policy: which
request has which row is the scheduler's business.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from duograph.kernels.bitmask import bitmask_words
from duograph.runners.batch import ForwardBatch, RowInit
from duograph.runners.sampling_params import SamplingParams
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
        # Columns of two blocks, so that a new request is two launches and not eight.
        fresh = _float_columns([SamplingParams(temperature=0.0)] * rows)
        self._floats = torch.tensor(fresh, dtype=torch.float32, device=device)
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

    def apply(self, batch: ForwardBatch) -> None:
        """Brings the tables up to date for ``batch``. Doing it again changes nothing."""
        self.apply_pages(batch)
        self.apply_rows(batch)

    def apply_pages(self, batch: ForwardBatch) -> None:
        """The page table alone: attention reads nothing else."""
        if batch.page_updates is None:
            return
        row, column, page = batch.page_updates.numpy()
        count = len(page)
        host, block = self._staging(count + (count + 1) // 2)
        block[:count] = row.astype(np.int64) * self.page_table.shape[1] + column
        block[count:].view(np.int32)[:count] = page
        places, pages = torch.split(
            host.to(self.device, non_blocking=True), [count, len(block) - count]
        )
        self.page_table.view(-1).index_copy_(0, places, pages.view(torch.int32)[:count])

    def apply_rows(self, batch: ForwardBatch) -> None:
        """What the sampler reads of the rows that were taken: parameters and counts."""
        inits = batch.row_inits
        if not inits:
            return
        count = len(inits)
        host, block = self._staging(6 * count)
        params = [init.sampling for init in inits]
        block[: 3 * count].reshape(3, count)[...] = [
            [init.row for init in inits],
            [p.top_k for p in params],
            [p.seed for p in params],
        ]
        block[3 * count :].view(np.float32).reshape(6, count)[...] = _float_columns(params)
        on_device = host.to(self.device, non_blocking=True).view(6, count)
        rows = on_device[0]
        self._ints.index_copy_(1, rows, on_device[1:3])
        floats = on_device[3:].view(-1).view(torch.float32).view(6, count)
        self._floats.index_copy_(1, rows, floats)
        for init in inits:
            if init.sampling.needs_penalty:
                self._init_counts(init)

    def _staging(self, words: int) -> tuple[torch.Tensor, npt.NDArray[np.int64]]:
        """A host block of 8-byte words, as a tensor and as an array: one copy to the device for
        all that a call brings, since each holds the host up for some microseconds."""
        host = torch.empty(words, dtype=torch.int64, pin_memory=self.device.type == "cuda")
        return host, host.numpy()

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


def _float_columns(params: list[SamplingParams]) -> list[list[float]]:
    """temperature, top_p, min_p, presence, frequency and repetition of each request."""
    return [
        [p.temperature for p in params],
        [p.top_p for p in params],
        [p.min_p for p in params],
        [p.presence_penalty for p in params],
        [p.frequency_penalty for p in params],
        [p.repetition_penalty for p in params],
    ]
