"""The plain forward, op by op: what a step falls back to and what graphs are compared with."""

from __future__ import annotations

import torch

from duograph.runners.batch import ForwardBatch, ForwardMode, ForwardOutput
from duograph.runners.forward_context import use_context
from duograph.runners.parts import RunnerParts, check_extend
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
        parts = self._parts
        inputs = batch.inputs.to(parts.device)
        parts.table.apply(inputs, batch.row_inits)
        rows, seq_lens = inputs.req_pool_indices, inputs.seq_lens
        if batch.mode is ForwardMode.DECODE:
            input_ids = parts.table.next_tokens[rows]
            context = parts.decode_context(
                rows, seq_lens, inputs.out_cache_loc, batch.inputs.seq_lens
            )
        else:
            check_extend(batch)
            assert inputs.input_ids is not None
            input_ids = inputs.input_ids
            context = parts.extend_context(inputs, batch)
        parts.attention.prepare(context.meta)
        scores: PromptScores | None = None
        with torch.no_grad(), use_context(context):
            if batch.mode is ForwardMode.DECODE:
                forward = parts.model.decode_forward(batch.batch_size)
                hidden = forward(input_ids, inputs.positions)
            else:
                every = parts.model.model(input_ids, inputs.positions)
                hidden, scores = every[inputs.last_rows], self._prompt_scores(batch, every)
            logits = parts.model.compute_logits(hidden)
        return ForwardOutput(
            logits=logits, tokens=None, rows=rows, seq_lens=seq_lens, prompt_scores=scores
        )

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
