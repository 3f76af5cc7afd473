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
from duograph.runners.step_inputs import StepInputs


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

    def decode_context(
        self,
        rows: torch.Tensor,
        seq_lens: torch.Tensor,
        out_cache_loc: torch.Tensor,
        seq_lens_cpu: torch.Tensor,
    ) -> ForwardContext:
        """One query row per sequence; all tensors [bs] and on the device, but for
        ``seq_lens_cpu``, which holds the lengths in host memory."""
        meta = AttentionMetadata(
            page_table=self.table.page_table,
            req_pool_indices=rows,
            seq_lens=seq_lens,
            out_cache_loc=out_cache_loc,
            page_size=self.kv_pool.page_size,
            seq_lens_cpu=seq_lens_cpu,
        )
        return self._context(meta, ForwardMode.DECODE)

    def extend_context(
        self,
        inputs: StepInputs,
        batch: ForwardBatch,
        out_cache_loc: torch.Tensor | None = None,
    ) -> ForwardContext:
        """``extend_lens[i]`` query rows of sequence i of ``batch``, one sequence after the other.

        Args:
            inputs: those of ``batch``, on the device.
            out_cache_loc: in their place; it may be longer. The rest are padding tokens, which
                are written to their slots and left alone by attention.
        """
        meta = AttentionMetadata(
            page_table=self.table.page_table,
            req_pool_indices=inputs.req_pool_indices,
            seq_lens=inputs.seq_lens,
            out_cache_loc=inputs.out_cache_loc if out_cache_loc is None else out_cache_loc,
            page_size=self.kv_pool.page_size,
            query_start_loc=inputs.query_start_loc,
            max_extend_len=max(batch.extend_lens),
            num_real_tokens=batch.num_tokens,
            seq_lens_cpu=batch.inputs.seq_lens,
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
    if batch.inputs.input_ids is None:
        raise ValueError("an extend batch needs input_ids")
    if sum(batch.extend_lens) != batch.num_tokens or min(batch.extend_lens) < 1:
        raise ValueError(
            f"extend_lens {batch.extend_lens} do not add up to {batch.num_tokens} tokens"
        )
