"""The static buffers that both graph runners read: permanent addresses, padded with dummies.

A padding row is an ordinary request: row 0 of the request table, seq_len 1, token 0,
position 0, KV slot 0. Kernels need no special case for it, and it can write nowhere but to
the dummy slot. This file knows no graph: it only fills tensors.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from duograph.runners.batch import ForwardBatch
from duograph.runners.request_table import DUMMY_ROW

DUMMY_SEQ_LEN = 1
DUMMY_SLOT = 0


class ExtendInputs(NamedTuple):
    """What the pieces of one level read, by token: int64 [level] each."""

    input_ids: torch.Tensor
    positions: torch.Tensor
    out_cache_loc: torch.Tensor


class GraphInputBuffers:
    """One set for decode and prefill: the two never run at the same time.

    What a decode step reads lies in one block, so that a step costs one copy: each of four
    small ones held the device up for longer than it took. Attributes of decode, by request:
        req_pool_indices, decode_positions, decode_out_cache_loc: int64 [max_bs]
        seq_lens: int32 [max_bs]
        seq_lens_cpu: the same lengths in host memory, replaced by every load
    Those of prefill, by token, are ``extend_inputs``. They are copied one by one from where the
    batch has them: packing them into one block took the host 71 us, on one H200, and the three
    copies 32.
    """

    def __init__(self, *, max_bs: int, max_tokens: int, device: torch.device) -> None:
        self.max_bs = max_bs
        self.max_tokens = max_tokens
        self._device = device
        self._dummies = torch.zeros(4 * max_bs, dtype=torch.int64)
        dummies = _DecodeViews(self._dummies, max_bs)
        dummies.fill_with_dummies()
        self._dummy_lens = self.seq_lens_cpu = dummies.seq_lens
        self._decode_block = self._dummies.to(device, copy=True)
        views = _DecodeViews(self._decode_block, max_bs)
        self.req_pool_indices = views.req_pool_indices
        self.decode_positions = views.positions
        self.decode_out_cache_loc = views.out_cache_loc
        self.seq_lens = views.seq_lens
        # a padding token is token 0 at position 0, written to slot 0
        self._extend = ExtendInputs(
            *(torch.zeros(max_tokens, dtype=torch.int64, device=device) for _ in range(3))
        )
        self._extend_used = 0  # tokens that may be something else than padding

    @property
    def nbytes(self) -> int:
        return self._decode_block.nbytes + sum(buffer.nbytes for buffer in self._extend)

    def extend_inputs(self, level: int) -> ExtendInputs:
        """Where a prefill step of ``level`` tokens finds its inputs."""
        return ExtendInputs(*(buffer[:level] for buffer in self._extend))

    def load_decode(self, batch: ForwardBatch, padded_size: int) -> None:
        """Copies ``batch``, whose tensors are on the host, to the front; all rows behind it
        are dummies.

        Raises:
            ValueError: the batch is larger than ``padded_size`` or that than the buffers.
        """
        size = batch.batch_size
        self._check(size, padded_size, self.max_bs)
        # A new block each time: the device may not have read the last one yet, and the caching
        # host allocator hands out memory again only when the copies from it have run.
        on_cuda = self._device.type == "cuda"
        host = torch.empty(self._dummies.shape, dtype=torch.int64, pin_memory=on_cuda)
        host.copy_(self._dummies)
        views = _DecodeViews(host, self.max_bs)
        views.req_pool_indices[:size] = batch.req_pool_indices
        views.positions[:size] = batch.positions
        views.out_cache_loc[:size] = batch.out_cache_loc
        views.seq_lens[:size] = batch.seq_lens
        self._decode_block.copy_(host, non_blocking=True)
        self.seq_lens_cpu = views.seq_lens

    def load_extend(self, batch: ForwardBatch, padded_size: int) -> None:
        """As ``load_decode``, for the per-token inputs of a prefill step; ``padded_size`` is
        in tokens. What attention reads per sequence is not padded and not copied here."""
        if batch.input_ids is None:
            raise ValueError("an extend batch needs input_ids")
        size = batch.num_tokens
        self._check(size, padded_size, self.max_tokens)
        values = (batch.input_ids, batch.positions, batch.out_cache_loc)
        for buffer, value in zip(self._extend, values, strict=True):
            buffer[:size].copy_(value, non_blocking=True)
            if size < self._extend_used:
                buffer[size : self._extend_used].zero_()
        self._extend_used = size

    def reset(self) -> None:
        """Every row a dummy: the state that graphs are captured in."""
        self._decode_block.copy_(self._dummies)
        self.seq_lens_cpu = self._dummy_lens
        for buffer in self._extend:
            buffer.zero_()
        self._extend_used = 0

    @staticmethod
    def _check(size: int, padded_size: int, limit: int) -> None:
        if not size <= padded_size <= limit:
            raise ValueError(
                f"a batch of {size} cannot be padded to {padded_size} in buffers of {limit}"
            )


class _DecodeViews:
    """The parts of a decode block, int64 [4 * max_bs]: three of int64, one of int32."""

    def __init__(self, block: torch.Tensor, max_bs: int) -> None:
        self.req_pool_indices = block[:max_bs]
        self.positions = block[max_bs : 2 * max_bs]
        self.out_cache_loc = block[2 * max_bs : 3 * max_bs]
        self.seq_lens = block[3 * max_bs :].view(torch.int32)[:max_bs]

    def fill_with_dummies(self) -> None:
        self.req_pool_indices.fill_(DUMMY_ROW)
        self.positions.zero_()
        self.out_cache_loc.fill_(DUMMY_SLOT)
        self.seq_lens.fill_(DUMMY_SEQ_LEN)
