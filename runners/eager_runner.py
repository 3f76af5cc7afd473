"""The plain forward, op by op: what a step falls back to and what graphs are compared with."""

from __future__ import annotations

from dataclasses import replace

import torch

from duograph.runners.batch import ForwardBatch, ForwardMode, ForwardOutput
from duograph.runners.forward_context import use_context
from duograph.runners.parts import RunnerParts
from duograph.runners.prompt_logprobs import PromptScores, score_prompt


class EagerRunner:
    """Runs any batch, of any size, without padding. Sampling is left to the sampler."""

    def __init__(self, parts: RunnerParts) -> None:
        self._parts = parts

    def run(self, batch: ForwardBatch) -> ForwardOutput:
        """Logits of the last row of each sequence, and what the batch wants to know of prompts.

        Raises:
            ValueError: an extend batch whose lengths do not add up.
        """
        parts = self._roomy(batch)
        buffers, size, tokens = parts.buffers, batch.batch_size, batch.num_tokens
        parts.load(batch, tokens)
        parts.table.init_counts(batch.row_inits)
        if batch.mode is ForwardMode.DECODE:
            context = parts.decode_context(size)
        else:
            context = parts.extend_context(batch, tokens)
        parts.attention.prepare(context.meta)
        scores: PromptScores | None = None
        with torch.no_grad(), use_context(context):
            if batch.mode is ForwardMode.DECODE:
                forward = parts.model.decode_forward(size)
                hidden = forward(buffers.decode_ids[:size], buffers.decode_positions[:size])
            else:
                inputs = buffers.extend_inputs(tokens)
                every = parts.model.model(inputs.input_ids, inputs.positions)
                hidden, scores = every[buffers.last_rows[:size]], self._prompt_scores(batch, every)
            logits = parts.model.compute_logits(hidden)
        return ForwardOutput(
            logits=logits,
            tokens=None,
            rows=buffers.req_pool_indices[:size],
            seq_lens=buffers.seq_lens[:size],
            prompt_scores=scores,
        )

    def _roomy(self, batch: ForwardBatch) -> RunnerParts:
        """The parts with buffers that hold ``batch``: those of the graphs hold what the worker's
        limits allow, and only a caller that goes beyond them needs others."""
        parts, size, tokens = self._parts, batch.batch_size, batch.num_tokens
        if size <= parts.buffers.max_bs and tokens <= parts.buffers.max_tokens:
            return parts
        return replace(parts, buffers=parts.buffers.resized(max_bs=size, max_tokens=tokens))

    def _prompt_scores(self, batch: ForwardBatch, hidden: torch.Tensor) -> PromptScores | None:
        wishes = batch.sampling.prompt_logprobs
        if not wishes:
            return None
        parts = self._parts
        return score_prompt(
            hidden,
            wishes,
            batch.extend_lens,
            parts.model.compute_logits,
            vocab_size=parts.table.vocab_size,
        )
