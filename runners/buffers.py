"""The static buffers that both graph runners read: permanent addresses, padded with dummies.

A padding row is an ordinary request: row 0 of the request table, seq_len 1, token 0,
position 0, KV slot 0. Kernels need no special case for it, and it can write nowhere but to
the dummy slot. This file knows no graph: it only fills tensors.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from duograph.kernels import step_inputs
from duograph.runners.request_table import DUMMY_ROW
from duograph.runners.step_inputs import StepInputs

DUMMY_SEQ_LEN = 1
DUMMY_SLOT = 0

_DECODE_DUMMIES = (DUMMY_ROW, 0, DUMMY_SLOT, DUMMY_SEQ_LEN)
_EXTEND_DUMMIES = (0, 0, DUMMY_SLOT)


class ExtendInputs(NamedTuple):
    """What the pieces of one level read, by token: int64 [level] each."""

    input_ids: torch.Tensor
    positions: torch.Tensor
    out_cache_loc: torch.Tensor


class GraphInputBuffers:
    """One set for decode and prefill: the two never run at the same time.

    Attributes of decode, by request:
        req_pool_indices, decode_positions, decode_out_cache_loc: int64 [max_bs]
        seq_lens: int32 [max_bs]
        seq_lens_cpu: the same lengths in host memory, replaced by every load
    Those of prefill, by token, are ``extend_inputs``.
    """

    def __init__(self, *, max_bs: int, max_tokens: int, device: torch.device) -> None:
        self.max_bs = max_bs
        self.max_tokens = max_tokens
        self._device = device

        def vector(length: int, fill: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.full((length,), fill, dtype=dtype, device=device)

        self.req_pool_indices = vector(max_bs, DUMMY_ROW)
        self.decode_positions = vector(max_bs, 0)
        self.decode_out_cache_loc = vector(max_bs, DUMMY_SLOT)
        self.seq_lens = vector(max_bs, DUMMY_SEQ_LEN, torch.int32)
        self._dummy_lens = self.seq_lens.to("cpu", copy=True)
        self.seq_lens_cpu = self._dummy_lens
        # a padding token is token 0 at position 0, written to slot 0
        self._extend = ExtendInputs(
            vector(max_tokens, 0), vector(max_tokens, 0), vector(max_tokens, DUMMY_SLOT)
        )

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in (*self._decode, *self._extend))

    def extend_inputs(self, level: int) -> ExtendInputs:
        """Where a prefill step of ``level`` tokens finds its inputs."""
        return ExtendInputs(*(buffer[:level] for buffer in self._extend))

    def load_decode(self, inputs: StepInputs, padded_size: int) -> None:
        """Copies a decode step to the front; the rows behind it, up to ``padded_size``, are
        dummies. ``inputs`` in page-locked memory is read when the device gets there, and has to
        stay until then.

        Raises:
            ValueError: the step is larger than ``padded_size`` or that than the buffers.
        """
        size = inputs.layout.sequences
        self._check(size, padded_size, self.max_bs)
        near = inputs.readable_by(self._device)
        step_inputs.copy_padded(
            (near.req_pool_indices, near.positions, near.out_cache_loc, near.seq_lens),
            self._decode,
            _DECODE_DUMMIES,
            count=size,
            end=padded_size,
        )
        # A new one each time: who plans with the last one may not be done.
        self.seq_lens_cpu = self._dummy_lens.clone()
        self.seq_lens_cpu[:size] = inputs.seq_lens

    def load_extend(self, inputs: StepInputs, padded_size: int) -> None:
        """As ``load_decode``, for the per-token inputs of a prefill step; ``padded_size`` is
        in tokens. What attention reads per sequence is not padded and not copied here."""
        if inputs.input_ids is None:
            raise ValueError("an extend batch needs input_ids")
        size = inputs.layout.tokens
        self._check(size, padded_size, self.max_tokens)
        near = inputs.readable_by(self._device)
        assert near.input_ids is not None
        step_inputs.copy_padded(
            (near.input_ids, near.positions, near.out_cache_loc),
            self._extend,
            _EXTEND_DUMMIES,
            count=size,
            end=padded_size,
        )

    def reset(self) -> None:
        """Every row a dummy: the state that graphs are captured in."""
        for buffer, dummy in zip(
            (*self._decode, *self._extend), (*_DECODE_DUMMIES, *_EXTEND_DUMMIES), strict=True
        ):
            buffer.fill_(dummy)
        self.seq_lens_cpu = self._dummy_lens

    @property
    def _decode(self) -> tuple[torch.Tensor, ...]:
        return (
            self.req_pool_indices,
            self.decode_positions,
            self.decode_out_cache_loc,
            self.seq_lens,
        )

    @staticmethod
    def _check(size: int, padded_size: int, limit: int) -> None:
        if not size <= padded_size <= limit:
            raise ValueError(
                f"a batch of {size} cannot be padded to {padded_size} in buffers of {limit}"
            )
