"""The tensors of one step, as the scheduler floor hands them to the model worker.

Request rows. Every running request owns one row, 1 .. max_running_requests, of the tables in
``request_table.py`` (page table, next token, sampling parameters). Row 0 is the dummy request
that padding uses. In decode the input token is not in the batch: the device takes it from
``RequestTable.next_tokens[row]``, where the previous step's sampler left it, so a step can be
launched before the host has read the result of the one before.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from duograph.runners.sampling_params import SamplingParams
from duograph.runners.step_inputs import StepInputs

if TYPE_CHECKING:
    from duograph.runners.prompt_logprobs import PromptScores


class ForwardMode(enum.Enum):
    EXTEND = "extend"  # prefill, chunk of a prefill, or recompute after retraction
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class RowInit:
    """A request has taken ``row``: its sampling parameters go into the row tables.

    The token lists are only given when penalties need them; after a retraction the tokens
    generated so far are in ``output_ids``.
    """

    row: int
    sampling: SamplingParams
    prompt_ids: list[int] | None = None
    output_ids: list[int] | None = None


@dataclass(frozen=True, slots=True)
class PromptWish:
    """Log-probabilities wanted of one sequence's prompt in one extend step.

    Row ``skip + i`` of the sequence's rows in this step is what token ``targets[i]`` follows.
    """

    skip: int  # rows of the sequence before the first wanted one
    targets: list[int]  # token ids, at least one
    k: int  # best tokens per row


class TokenMasks(Protocol):
    """Packed bitmasks (kernels/bitmask.py) of some rows, made while the forward runs."""

    @property
    def indices(self) -> list[int]:
        """Batch indices, in the order of the masks."""

    def wait(self) -> torch.Tensor:
        """int32 [len(indices), words] in host memory, pinned if the device is CUDA. Blocks
        until they are there; raises what the step that they depend on raised."""


@dataclass(slots=True)
class SamplingBatch:
    """Host-known facts that decide which sampling work a step needs. Indices are positions
    in the batch, 0 .. bs - 1."""

    filtered: bool = False  # some row has top-k, top-p or min-p
    # Rows whose penalties apply. A prompt chunk that is not the last must not be listed:
    # its token would be counted as generated.
    penalized: list[int] = field(default_factory=list)
    # additive bias per batch index; a token banned by min_new_tokens has -inf
    bias: dict[int, dict[int, float]] = field(default_factory=dict)
    logprobs: dict[int, int] = field(default_factory=dict)  # batch index -> k best
    masks: TokenMasks | None = None  # of the rows that follow a grammar
    prompt_logprobs: dict[int, PromptWish] = field(default_factory=dict)  # by batch index


@dataclass(slots=True)
class ForwardBatch:
    """One step."""

    step_id: int
    mode: ForwardMode
    inputs: StepInputs
    extend_lens: list[int]  # tokens of each sequence in this step; all 1 in decode
    row_inits: list[RowInit]  # of the rows that are taken
    sampling: SamplingBatch

    @property
    def batch_size(self) -> int:
        return self.inputs.layout.sequences

    @property
    def num_tokens(self) -> int:
        layout = self.inputs.layout
        return layout.tokens or layout.sequences


def dummy_batch(mode: ForwardMode, size: int, *, pinned: bool = False) -> ForwardBatch:
    """``size`` decode rows of the dummy request, or one dummy prompt of ``size`` tokens, with
    every filter on."""
    if mode is ForwardMode.DECODE:
        inputs = StepInputs.decode([0] * size, [1] * size, [0] * size, pinned=pinned)
    else:
        inputs = StepInputs.extend(
            [0],
            [size],
            [0] * size,  # enough for any page size
            starts=[0],
            tokens=[np.zeros(size, np.int64)],
            page_size=1,
            pinned=pinned,
        )
    return ForwardBatch(
        step_id=0,
        mode=mode,
        inputs=inputs,
        extend_lens=[1] * size if mode is ForwardMode.DECODE else [size],
        row_inits=[],
        sampling=SamplingBatch(filtered=True),
    )


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural-log probabilities of one sampled or prompt token and of the k most likely ones,
    taken from the model's raw logits: before temperature, penalties, bias and filters."""

    logprob: float
    top_ids: list[int]
    top_logprobs: list[float]


@dataclass(frozen=True, slots=True)
class StepResult:
    """What the host learns from one step. ``tokens[i]`` belongs to sequence i of the batch,
    also for a prompt chunk that was not the last, whose token is to be ignored."""

    step_id: int
    tokens: list[int]
    logprobs: dict[int, TokenLogprobs]  # by batch index
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)  # likewise


@dataclass(slots=True)
class ForwardOutput:
    """What a runner leaves on the device for the sampler. The tensors may be views of graph
    memory: they are good until the next replay on the same stream."""

    logits: torch.Tensor  # [bs, vocab], raw; float32 or (on CUDA) the weights' dtype
    tokens: torch.Tensor | None  # int64 [bs] if plain sampling ran inside the graph
    rows: torch.Tensor  # int64 [bs], the batch's request rows on the device
    seq_lens: torch.Tensor  # int32 [bs], on the device
    prompt_scores: PromptScores | None = None


class StepOutput:
    """A launched step. It owns the batch, whose host tensors the device may still be reading,
    until the result has been waited for."""

    def __init__(self, batch: ForwardBatch, wait: Callable[[], StepResult]) -> None:
        self.step_id = batch.step_id
        self._batch: ForwardBatch | None = batch
        self._wait = wait
        self._result: StepResult | None = None

    def wait(self) -> StepResult:
        """Blocks until the step has run; may be called again.

        Raises:
            Exception: whatever the forward raised; the device state is unknown afterwards and
                the process must end.
        """
        if self._result is None:
            self._result = self._wait()
            self._batch = None
        return self._result
