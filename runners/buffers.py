"""The static buffers that both graph runners read: permanent addresses, padded with dummies.

A padding row is an ordinary request: row 0 of the request table, seq_len 1, token 0,
position 0, KV slot 0. Kernels need no special case for it, and it can write nowhere but to
the dummy slot. This file knows no graph: it only fills tensors.
"""

from __future__ import annotations

import torch

from duograph.runners.batch import ForwardBatch
from duograph.runners.request_table import DUMMY_ROW

DUMMY_SEQ_LEN = 1
DUMMY_SLOT = 0


class GraphInputBuffers:
    """One set for decode and prefill: the two never run at the same time.

    Attributes:
        req_pool_indices: int64 [max_bs]
        seq_lens: int32 [max_bs]
        input_ids, positions, out_cache_loc: int64 [max_tokens]
    """

    def __init__(self, *, max_bs: int, max_tokens: int, device: torch.device) -> None:
        self.max_bs = max_bs
        self.max_tokens = max(max_tokens, max_bs)  # decode has one token per request
        tokens = self.max_tokens
        self.req_pool_indices = torch.full((max_bs,), DUMMY_ROW, dtype=torch.int64, device=device)
        self.seq_lens = torch.full((max_bs,), DUMMY_SEQ_LEN, dtype=torch.int32, device=device)
        self.input_ids = torch.zeros(tokens, dtype=torch.int64, device=device)
        self.positions = torch.zeros(tokens, dtype=torch.int64, device=device)
        self.out_cache_loc = torch.full((tokens,), DUMMY_SLOT, dtype=torch.int64, device=device)
        self._fills = {
            "req_pool_indices": DUMMY_ROW,
            "seq_lens": DUMMY_SEQ_LEN,
            "input_ids": 0,
            "positions": 0,
            "out_cache_loc": DUMMY_SLOT,
        }
        # How far each buffer holds something else than dummies. In steady decode no fill
        # is launched at all.
        self._used = dict.fromkeys(self._fills, 0)

    @property
    def nbytes(self) -> int:
        return sum(getattr(self, name).nbytes for name in self._fills)

    def load_decode(self, batch: ForwardBatch, padded_size: int) -> None:
        """Copies ``batch`` to the front and leaves dummies in rows up to ``padded_size``.

        Raises:
            ValueError: the batch is larger than ``padded_size`` or that than the buffers.
        """
        self._check(batch.batch_size, padded_size, self.max_bs)
        self._load("req_pool_indices", batch.req_pool_indices)
        self._load("seq_lens", batch.seq_lens)
        self._load("positions", batch.positions)
        self._load("out_cache_loc", batch.out_cache_loc)

    def load_extend(self, batch: ForwardBatch, padded_size: int) -> None:
        """As ``load_decode``, for the per-token inputs of a prefill step; ``padded_size`` is
        in tokens. What attention reads per sequence is not padded and not copied here."""
        if batch.input_ids is None:
            raise ValueError("an extend batch needs input_ids")
        self._check(batch.num_tokens, padded_size, self.max_tokens)
        self._load("input_ids", batch.input_ids)
        self._load("positions", batch.positions)
        self._load("out_cache_loc", batch.out_cache_loc)

    def reset(self) -> None:
        """Every row a dummy: the state that graphs are captured in."""
        for name, fill in self._fills.items():
            getattr(self, name).fill_(fill)
            self._used[name] = 0

    def _load(self, name: str, values: torch.Tensor) -> None:
        buffer: torch.Tensor = getattr(self, name)
        size = values.shape[0]
        buffer[:size].copy_(values, non_blocking=True)
        if size < self._used[name]:
            buffer[size : self._used[name]].fill_(self._fills[name])
        self._used[name] = size

    @staticmethod
    def _check(size: int, padded_size: int, limit: int) -> None:
        if not size <= padded_size <= limit:
            raise ValueError(
                f"a batch of {size} cannot be padded to {padded_size} in buffers of {limit}"
            )
