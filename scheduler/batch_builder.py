"""Step -> ForwardBatch: the plan's numbers as one block, pinned when it goes to a GPU.

The only file of this floor, besides the process's set-up, that knows torch.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from duograph.kernels.bitmask import bitmask_words
from duograph.runners.batch import ForwardBatch, ForwardMode, PromptWish, RowInit, SamplingBatch
from duograph.runners.step_inputs import StepInputs
from duograph.scheduler.grammar_masks import MaskMaker
from duograph.scheduler.loop import PendingStep
from duograph.scheduler.request import Request
from duograph.scheduler.step import Plan


class _PendingMasks:
    """See runners.batch.TokenMasks."""

    def __init__(self, indices: list[int], block: torch.Tensor, ready: Callable[[], None]) -> None:
        self.indices = indices
        self._block = block
        self._ready = ready

    def wait(self) -> torch.Tensor:
        self._ready()
        return self._block


class BatchBuilder:
    def __init__(
        self,
        *,
        page_size: int,
        pinned: bool,
        vocab_size: int = 0,
        masks: MaskMaker | None = None,
    ) -> None:
        """``masks`` and ``vocab_size`` are for requests with grammars. ``pinned``: put the
        blocks into page-locked memory, where kernels can read them."""
        self._page_size = page_size
        self._pinned = pinned
        self._words = bitmask_words(vocab_size)
        self._masks = masks
        self._plan: Plan | None = None  # built last

    @property
    def takes_grammars(self) -> bool:
        return self._masks is not None

    def launched(self, pending: PendingStep) -> None:
        """What was built last runs."""
        if self._masks is not None and self._plan is not None:
            self._masks.launched(self._plan, pending)

    def build(self, plan: Plan) -> ForwardBatch:
        self._plan = plan
        if plan.is_extend:
            extend_lens = [end - at for end, at in zip(plan.seq_lens, plan.starts, strict=True)]
        else:
            extend_lens = [1] * len(plan.rows)
        return ForwardBatch(
            step_id=plan.step_id,
            mode=ForwardMode.EXTEND if plan.is_extend else ForwardMode.DECODE,
            inputs=self.inputs(plan),
            extend_lens=extend_lens,
            row_inits=[_row_init(request) for request in plan.new_rows],
            sampling=SamplingBatch(
                filtered=plan.filtered,
                penalized=plan.penalized,
                bias=plan.bias,
                logprobs=plan.logprobs,
                masks=self._start_masks(plan) if plan.constrained else None,
                prompt_logprobs={
                    index: PromptWish(
                        span.skip,
                        plan.requests[index].prompt[span.begin : span.end].tolist(),
                        span.k,
                    )
                    for index, span in plan.prompt_logprobs.items()
                },
            ),
        )

    def _start_masks(self, plan: Plan) -> _PendingMasks:
        assert self._masks is not None, "the gate lets no grammar through"
        shape = (len(plan.constrained), self._words)
        block = torch.empty(shape, dtype=torch.int32, pin_memory=self._pinned)
        return _PendingMasks(plan.constrained, block, self._masks.start(plan, block.numpy()))

    def inputs(self, plan: Plan) -> StepInputs:
        """The block of numbers that ``plan`` brings to the device."""
        inits = [(request.row, request.sampling) for request in plan.new_rows]
        if not plan.is_extend:
            return StepInputs.decode(
                plan.rows,
                plan.seq_lens,
                plan.pages,
                page_updates=plan.page_updates,
                row_inits=inits,
                pinned=self._pinned,
            )
        return StepInputs.extend(
            plan.rows,
            plan.seq_lens,
            plan.pages,
            starts=plan.starts,
            tokens=plan.tokens,
            page_size=self._page_size,
            page_updates=plan.page_updates,
            row_inits=inits,
            pinned=self._pinned,
        )


def _row_init(request: Request) -> RowInit:
    needs_tokens = request.sampling.needs_penalty
    return RowInit(
        row=request.row,
        sampling=request.sampling,
        prompt_ids=request.prompt.tolist() if needs_tokens else None,
        output_ids=list(request.output_ids) if needs_tokens else None,
    )
