"""Device tables with one row per running request.

A step names rows, and the device finds pages, the last token and sampling parameters there,
so that a decode step uploads four small tensors and never the requests' state. Row 0 is the
dummy request that padding uses: page 0, token 0, greedy. This file knows no policy: which
request has which row is the scheduler's business.
"""

from __future__ import annotations

import torch

from duograph.runners.batch import ForwardBatch, RowInit
from duograph.runners.upload import upload

DUMMY_ROW = 0


class RequestTable:
    """The tables; R = ``max_running_requests`` + 1 rows, V = vocabulary.

    Attributes:
        page_table: int32 [R, max_pages].
        next_tokens: int64 [R], written by the sampler of one step, read by the next.
        temperature, top_p, min_p: float32 [R].
        top_k: int32 [R], -1 = off.
        seed: int64 [R].
        presence, frequency, repetition: float32 [R], penalties.
        prompt_mask: bool [R, V], tokens of the prompt; output_counts: int32 [R, V]. Rows of
            requests without penalties hold leftovers and are never read.
    """

    def __init__(
        self, *, max_running_requests: int, max_pages: int, vocab_size: int, device: torch.device
    ) -> None:
        rows = max_running_requests + 1

        def table(fill: float, dtype: torch.dtype, *shape: int) -> torch.Tensor:
            return torch.full((rows, *shape), fill, dtype=dtype, device=device)

        self.device = device
        self.num_rows = rows
        self.page_table = table(0, torch.int32, max_pages)
        self.next_tokens = table(0, torch.int64)
        self.temperature = table(0.0, torch.float32)
        self.top_p = table(1.0, torch.float32)
        self.min_p = table(0.0, torch.float32)
        self.top_k = table(-1, torch.int32)
        self.seed = table(0, torch.int64)
        self.presence = table(0.0, torch.float32)
        self.frequency = table(0.0, torch.float32)
        self.repetition = table(1.0, torch.float32)
        self.prompt_mask = table(False, torch.bool, vocab_size)
        self.output_counts = table(0, torch.int32, vocab_size)

    @property
    def nbytes(self) -> int:
        tensors = [value for value in vars(self).values() if isinstance(value, torch.Tensor)]
        return sum(tensor.nbytes for tensor in tensors)

    def apply(self, batch: ForwardBatch) -> None:
        """Brings the tables up to date for ``batch``: first rows that were taken, then pages."""
        if batch.row_inits:
            self._init_rows(batch.row_inits)
        if batch.page_updates is not None:
            update = batch.page_updates.to(self.device, non_blocking=True)
            self.page_table[update[0].long(), update[1].long()] = update[2]

    def _init_rows(self, inits: list[RowInit]) -> None:
        params = [init.sampling for init in inits]
        rows = self._upload([init.row for init in inits], torch.int64)
        floats = {
            "temperature": [p.temperature for p in params],
            "top_p": [p.top_p for p in params],
            "min_p": [p.min_p for p in params],
            "presence": [p.presence_penalty for p in params],
            "frequency": [p.frequency_penalty for p in params],
            "repetition": [p.repetition_penalty for p in params],
        }
        # one upload for all six columns
        values = self._upload(list(floats.values()), torch.float32)
        for name, column in zip(floats, values, strict=True):
            getattr(self, name)[rows] = column
        self.top_k[rows] = self._upload([p.top_k for p in params], torch.int32)
        self.seed[rows] = self._upload([p.seed for p in params], torch.int64)
        for init in inits:
            if init.sampling.needs_penalty:
                self._init_counts(init)

    def _init_counts(self, init: RowInit) -> None:
        self.prompt_mask[init.row].zero_()
        self.output_counts[init.row].zero_()
        if init.prompt_ids:
            self.prompt_mask[init.row, self._upload(init.prompt_ids, torch.int64)] = True
        if init.output_ids:
            ids = self._upload(init.output_ids, torch.int64)
            self.output_counts[init.row].index_add_(0, ids, torch.ones_like(ids, dtype=torch.int32))

    def _upload(self, values: list[int] | list[list[float]], dtype: torch.dtype) -> torch.Tensor:
        return upload(values, dtype, self.device)
