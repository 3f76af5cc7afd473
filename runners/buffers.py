"""The static buffers that both graph runners read: permanent addresses, padded with dummies.

A padding row is an ordinary request: row 0 of the request table, seq_len 1, token 0,
position 0, KV slot 0. Kernels need no special case for it, and it can write nowhere but to
the dummy slot. This file knows no graph: it only fills tensors.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from duograph.kernels import step_inputs
from duograph.kernels.step_inputs import DecodeTargets, ExtendTargets, Tables
from duograph.runners.request_table import DUMMY_ROW
from duograph.runners.step_inputs import StepInputs

DUMMY_SEQ_LEN = 1
DUMMY_SLOT = 0


class ExtendInputs(NamedTuple):
    """What the pieces of one level read, by token: int64 [level] each."""

    input_ids: torch.Tensor
    positions: torch.Tensor
    out_cache_loc: torch.Tensor


class GraphInputBuffers:
    """One set for decode and prefill: the two never run at the same time.

    Attributes by request, those of decode padded:
        req_pool_indices: int64 [max_bs]
        seq_lens: int32 [max_bs]
        seq_lens_cpu: those of the step loaded last, in host memory, replaced by every load
        decode_ids, decode_positions, decode_out_cache_loc: int64 [max_bs]
        query_start_loc: int32 [max_bs + 1]; last_rows: int64 [max_bs]; of prefill, not padded
    Those by token are ``extend_inputs``.
    """

    def __init__(
        self, *, max_bs: int, max_tokens: int, page_size: int, device: torch.device
    ) -> None:
        self.max_bs = max_bs
        self.max_tokens = max_tokens
        self._page_size = page_size
        self._device = device

        def vector(length: int, fill: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.full((length,), fill, dtype=dtype, device=device)

        self.req_pool_indices = vector(max_bs, DUMMY_ROW)
        self.seq_lens = vector(max_bs, DUMMY_SEQ_LEN, torch.int32)
        self._dummy_lens = self.seq_lens.to("cpu", copy=True)
        self.seq_lens_cpu = self._dummy_lens
        self.decode_ids = vector(max_bs, 0)
        self.decode_positions = vector(max_bs, 0)
        self.decode_out_cache_loc = vector(max_bs, DUMMY_SLOT)
        self.query_start_loc = vector(max_bs + 1, 0, torch.int32)
        self.last_rows = vector(max_bs, 0)
        # a padding token is token 0 at position 0, written to slot 0
        self._extend = ExtendInputs(
            vector(max_tokens, 0), vector(max_tokens, 0), vector(max_tokens, DUMMY_SLOT)
        )

    def resized(self, *, max_bs: int, max_tokens: int) -> GraphInputBuffers:
        """New ones, fresh."""
        return GraphInputBuffers(
            max_bs=max_bs,
            max_tokens=max_tokens,
            page_size=self._page_size,
            device=self._device,
        )

    @property
    def nbytes(self) -> int:
        found = [value for value in vars(self).values() if isinstance(value, torch.Tensor)]
        on_device = [tensor for tensor in found if tensor.device.type == self._device.type]
        return sum(buffer.nbytes for buffer in (*on_device, *self._extend))

    def extend_inputs(self, level: int) -> ExtendInputs:
        """Where a prefill step of ``level`` tokens finds its inputs."""
        return ExtendInputs(*(buffer[:level] for buffer in self._extend))

    def load_decode(self, inputs: StepInputs, padded_size: int, tables: Tables) -> None:
        """Brings ``tables`` up to date, and the step's rows to the front; those behind it, up to
        ``padded_size``, are dummies. ``inputs`` in page-locked memory is read when the device
        gets there, and has to stay until then.

        Raises:
            ValueError: the step is larger than ``padded_size`` or that than the buffers.
        """
        size = inputs.layout.sequences
        self._check(size, padded_size, self.max_bs)
        step_inputs.load_decode(
            inputs.readable_by(self._device),
            inputs.layout,
            tables,
            DecodeTargets(
                self.req_pool_indices,
                self.seq_lens,
                self.decode_ids,
                self.decode_positions,
                self.decode_out_cache_loc,
            ),
            padded=padded_size,
            page_size=self._page_size,
        )
        # A new one each time: who plans with the last one may not be done.
        self.seq_lens_cpu = self._dummy_lens.clone()
        self.seq_lens_cpu[:size] = inputs.seq_lens

    def load_extend(
        self, inputs: StepInputs, padded_size: int, tables: Tables, longest: int
    ) -> None:
        """As ``load_decode``; ``padded_size`` is in tokens, and what there is by sequence is not
        padded. ``longest``: tokens of the longest sequence in the step."""
        layout = inputs.layout
        if not inputs.is_extend:
            raise ValueError("an extend batch needs tokens")
        self._check(layout.tokens, padded_size, self.max_tokens)
        self._check(layout.sequences, layout.sequences, self.max_bs)
        step_inputs.load_extend(
            inputs.readable_by(self._device),
            layout,
            tables,
            ExtendTargets(
                self.req_pool_indices,
                self.seq_lens,
                self.query_start_loc,
                self.last_rows,
                *self._extend,
            ),
            longest=longest,
            padded=padded_size,
            page_size=self._page_size,
        )
        self.seq_lens_cpu = inputs.seq_lens.to(torch.int32)

    def reset(self) -> None:
        """Every row a dummy: the state that graphs are captured in."""
        self.req_pool_indices.fill_(DUMMY_ROW)
        self.seq_lens.fill_(DUMMY_SEQ_LEN)
        self.seq_lens_cpu = self._dummy_lens
        for slots in (self.decode_out_cache_loc, self._extend.out_cache_loc):
            slots.fill_(DUMMY_SLOT)
        for zeros in (
            *(self.decode_ids, self.decode_positions, self.query_start_loc, self.last_rows),
            *self._extend[:2],
        ):
            zeros.zero_()

    @staticmethod
    def _check(size: int, padded_size: int, limit: int) -> None:
        if not size <= padded_size <= limit:
            raise ValueError(
                f"a batch of {size} cannot be padded to {padded_size} in buffers of {limit}"
            )
