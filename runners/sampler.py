"""Logits to tokens, after a forward or inside the decode graph.

Plain rows (greedy or temperature) are sampled by ``sample_plain``, which the decode graph
contains. A batch in which some row asks for more (top-k, top-p, min-p, penalties, bias) is
sampled again by ``finish`` from the same logits; a plain row gets the same token both times,
because the random numbers depend on nothing but its seed and position. Penalty counts live on
the device, so the next step can be launched before the host has seen the token. Rows that
follow a grammar are sampled once more, and only they, under masks that the host makes while the
forward runs. This file knows no graph and no request, only rows of the request table.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from duograph.kernels import sampling
from duograph.kernels.bitmask import masked_logits
from duograph.runners.batch import (
    ForwardBatch,
    ForwardOutput,
    SamplingBatch,
    StepResult,
    TokenLogprobs,
)
from duograph.runners.prompt_logprobs import PromptScores
from duograph.runners.request_table import RequestTable
from duograph.runners.upload import upload


@dataclass(slots=True)
class LogprobTensors:
    """Of the rows that asked, in the order of ``wanted``: batch index and number of best."""

    wanted: list[tuple[int, int]]
    chosen: torch.Tensor  # float32 [m]
    top_ids: torch.Tensor  # int64 [m, k of the greediest]
    top_logprobs: torch.Tensor  # float32, likewise


@dataclass(slots=True)
class SampledStep:
    """The result of a step as tensors, on the device or (see ``streams.py``) on the host."""

    step_id: int
    tokens: torch.Tensor  # int64 [bs]
    logprobs: LogprobTensors | None
    prompt_scores: PromptScores | None = None

    def to_result(self) -> StepResult:
        """Reads the tensors, which must be complete and on the host."""
        found: dict[int, TokenLogprobs] = {}
        if self.logprobs is not None:
            columns = (
                self.logprobs.chosen.tolist(),
                self.logprobs.top_ids.tolist(),
                self.logprobs.top_logprobs.tolist(),
            )
            for (index, k), chosen, ids, values in zip(self.logprobs.wanted, *columns, strict=True):
                found[index] = TokenLogprobs(chosen, ids[:k], values[:k])
        scores = self.prompt_scores
        prompts = {} if scores is None else scores.to_lists()
        return StepResult(self.step_id, self.tokens.tolist(), found, prompts)


class Sampler:
    """Works on one request table."""

    def __init__(self, table: RequestTable) -> None:
        self._table = table

    def sample_plain(
        self, logits: torch.Tensor, rows: torch.Tensor, seq_lens: torch.Tensor
    ) -> torch.Tensor:
        """Greedy or by temperature, as each row's request says, and left in ``next_tokens`` for
        the step after; graph-safe.

        Args:
            logits: float32, on CUDA also 16-bit, [n, vocab].
            rows: int64 [n].
            seq_lens: int32 [n], the position of the token to be sampled.
        Returns:
            int64 [n].
        """
        return self._sample(logits, rows, seq_lens, filtered=False)

    def finish(self, batch: ForwardBatch, output: ForwardOutput) -> SampledStep:
        """The tokens of a step, left in ``next_tokens`` too, with counts and logprobs."""
        wishes = batch.sampling
        tokens, logits = output.tokens, output.logits
        if wishes.filtered or wishes.penalized or wishes.bias:
            logits = self._adjusted(output, wishes)
            tokens = self._sample(logits, output.rows, output.seq_lens, filtered=wishes.filtered)
        elif tokens is None:
            tokens = self.sample_plain(output.logits, output.rows, output.seq_lens)
        if wishes.masks is not None:
            tokens = self._constrain(logits, tokens, output, wishes)
        if wishes.penalized:
            self._count(output.rows, tokens, wishes.penalized)
        logprobs = self._logprobs(output.logits, tokens, wishes)
        return SampledStep(batch.step_id, tokens, logprobs, output.prompt_scores)

    def _sample(
        self, logits: torch.Tensor, rows: torch.Tensor, seq_lens: torch.Tensor, *, filtered: bool
    ) -> torch.Tensor:
        table = self._table
        return sampling.sample(
            logits,
            temperature=table.temperature,
            top_k=table.top_k,
            top_p=table.top_p,
            min_p=table.min_p,
            seed=table.seed,
            position=seq_lens,
            filtered=filtered,
            rows=rows,
            next_tokens=table.next_tokens,
        )

    def _constrain(
        self,
        logits: torch.Tensor,
        tokens: torch.Tensor,
        output: ForwardOutput,
        wishes: SamplingBatch,
    ) -> torch.Tensor:
        """``tokens`` with those of the masked rows sampled anew, from ``logits``."""
        masks = wishes.masks
        assert masks is not None
        index = upload(masks.indices, torch.int64, logits.device)
        on_host = masks.wait()
        bitmask = self._table.bitmask[: len(masks.indices)]
        bitmask.copy_(on_host, non_blocking=True)
        chosen = self._sample(
            masked_logits(logits, index, bitmask),
            output.rows[index],
            output.seq_lens[index],
            filtered=wishes.filtered,
        )
        return tokens.index_copy(0, index, chosen)

    def _adjusted(self, output: ForwardOutput, wishes: SamplingBatch) -> torch.Tensor:
        """Float32 logits with penalties and bias; the raw ones are still needed for logprobs."""
        if not wishes.penalized and not wishes.bias:
            return output.logits
        logits = output.logits.to(torch.float32, copy=True)
        table, device = self._table, logits.device
        if wishes.penalized:
            index = upload(wishes.penalized, torch.int64, device)
            rows = output.rows[index]
            logits[index] = sampling.apply_penalties(
                logits[index],
                output_counts=table.output_counts[rows],
                in_prompt=table.prompt_mask[rows],
                presence=table.presence[rows],
                frequency=table.frequency[rows],
                repetition=table.repetition[rows],
            )
        if wishes.bias:
            cells = [(i, t, v) for i, bias in wishes.bias.items() for t, v in bias.items()]
            places = upload([[i, t] for i, t, _ in cells], torch.int64, device)
            values = upload([value for _, _, value in cells], torch.float32, device)
            sampling.add_logit_bias(logits, places[:, 0], places[:, 1], values)
        return logits

    def _count(self, rows: torch.Tensor, tokens: torch.Tensor, penalized: list[int]) -> None:
        counts = self._table.output_counts
        index = upload(penalized, torch.int64, rows.device)
        where = rows[index] * counts.shape[1] + tokens[index]
        counts.view(-1).index_add_(0, where, torch.ones_like(where, dtype=counts.dtype))

    def _logprobs(
        self, logits: torch.Tensor, tokens: torch.Tensor, wishes: SamplingBatch
    ) -> LogprobTensors | None:
        if not wishes.logprobs:
            return None
        wanted = list(wishes.logprobs.items())
        index = upload([i for i, _ in wanted], torch.int64, logits.device)
        k = max(k for _, k in wanted)
        chosen, top_ids, top_logprobs = sampling.top_logprobs(
            logits[index].float(), tokens[index], k
        )
        return LogprobTensors(wanted, chosen, top_ids, top_logprobs)
