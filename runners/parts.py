"""What every runner works with, and the forward contexts made from it.

One model, one set of tables and buffers, one KV pool. This file knows no graph: it only says
how a step looks to the layer ops.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from duograph.kernels.attention.base import AttentionMetadata, PhaseBackends
from duograph.runners.batch import ForwardBatch, ForwardMode
from duograph.runners.buffers import GraphInputBuffers
from duograph.runners.forward_context import ForwardContext
from duograph.runners.kv_pool import KVPool
from duograph.runners.request_table import RequestTable


class Transformer(Protocol):
    """The part of a model that graphs and pieces are made of."""

    def __call__(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """int64 [num_tokens] twice -> hidden states [num_tokens, hidden_size]."""


class CausalLM(Protocol):
    """What the runners need of a model."""

    @property
    def model(self) -> Transformer: ...

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, hidden_size] -> [n, vocab_size], float32 or (on CUDA) the weights' dtype."""

    def decode_forward(self, rows: int) -> Transformer:
        """The forward of a decode step of ``rows`` rows; as ``model`` up to rounding."""


@dataclass(frozen=True, slots=True)
class RunnerParts:
    """The collaborators that the runners of one worker share.

    ``cos_sin`` is the model's rotary table, float32 [context_length, head_dim].
    """

    model: CausalLM
    cos_sin: torch.Tensor
    table: RequestTable
    buffers: GraphInputBuffers
    kv_pool: KVPool
    attention: PhaseBackends
    device: torch.device

    def load(self, batch: ForwardBatch, padded_size: int) -> None:
        """Brings tables and static buffers up to date for ``batch``, padded to so many rows or
        tokens. Doing it again changes nothing. ``table.init_counts`` is left to the caller.

        Raises:
            ValueError: the batch is malformed or does not fit.
        """
        if batch.mode is ForwardMode.DECODE:
            self.buffers.load_decode(batch.inputs, padded_size, self.table.tables)
            return
        check_extend(batch)
        longest = max(batch.extend_lens)
        self.buffers.load_extend(batch.inputs, padded_size, self.table.tables, longest)

    def decode_context(self, size: int) -> ForwardContext:
        """Of the first ``size`` rows of the static buffers."""
        buffers = self.buffers
        meta = AttentionMetadata(
            page_table=self.table.page_table,
            req_pool_indices=buffers.req_pool_indices[:size],
            seq_lens=buffers.seq_lens[:size],
            out_cache_loc=buffers.decode_out_cache_loc[:size],
            page_size=self.kv_pool.page_size,
            seq_lens_cpu=buffers.seq_lens_cpu[:size],
        )
        return self._context(meta, ForwardMode.DECODE)

    def extend_context(self, batch: ForwardBatch, padded_size: int) -> ForwardContext:
        """Of ``batch``, which has been loaded: ``extend_lens[i]`` query rows of sequence i, one
        sequence after the other. The rest of ``padded_size`` are padding tokens, which are
        written to their slots and left alone by attention."""
        buffers, count = self.buffers, batch.batch_size
        meta = AttentionMetadata(
            page_table=self.table.page_table,
            req_pool_indices=buffers.req_pool_indices[:count],
            seq_lens=buffers.seq_lens[:count],
            out_cache_loc=buffers.extend_inputs(padded_size).out_cache_loc,
            page_size=self.kv_pool.page_size,
            query_start_loc=buffers.query_start_loc[: count + 1],
            max_extend_len=max(batch.extend_lens),
            num_real_tokens=batch.num_tokens,
            seq_lens_cpu=buffers.seq_lens_cpu,
            extend_lens=batch.extend_lens,
        )
        return self._context(meta, ForwardMode.EXTEND)

    def _context(self, meta: AttentionMetadata, mode: ForwardMode) -> ForwardContext:
        return ForwardContext(
            meta=meta,
            mode=mode,
            kv_pool=self.kv_pool,
            backend=self.attention.of(meta),
            cos_sin=self.cos_sin,
        )


def check_extend(batch: ForwardBatch) -> None:
    """Raises ValueError if an extend batch is malformed in a way that would corrupt memory."""
    if sum(batch.extend_lens) != batch.num_tokens or min(batch.extend_lens) < 1:
        raise ValueError(
            f"extend_lens {batch.extend_lens} do not add up to {batch.num_tokens} tokens"
        )
