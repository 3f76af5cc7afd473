"""Step -> ForwardBatch: the plan's arrays as tensors, pinned when they go to a GPU.

The only file of this floor, besides the process's set-up, that knows torch.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from duograph.kernels.bitmask import bitmask_words
from duograph.runners.batch import ForwardBatch, ForwardMode, PromptWish, RowInit, SamplingBatch
from duograph.scheduler.grammar_masks import MaskMaker
from duograph.scheduler.loop import PendingStep
from duograph.scheduler.request import Request
from duograph.scheduler.step import Plan
from duograph.scheduler.step_arrays import Ints, step_arrays


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
        tensors into page-locked memory, so that copies to the GPU can be asynchronous. Blocks
        come from torch's caching host allocator, which hands one out again only when the copies
        from it have run: no staging buffer to guard here."""
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
        arrays = step_arrays(plan, self._page_size)
        longs = [arrays.rows, arrays.positions, arrays.out_cache_loc]
        ints = [arrays.seq_lens]
        if arrays.input_ids is not None:
            longs.append(arrays.input_ids)
        if arrays.page_updates is not None:
            ints.append(arrays.page_updates.ravel())
        long_tensors = self._tensors(longs, torch.int64)
        int_tensors = self._tensors(ints, torch.int32)
        if plan.is_extend:
            extend_lens = [end - at for end, at in zip(plan.seq_lens, plan.starts, strict=True)]
        else:
            extend_lens = [1] * len(plan.rows)
        return ForwardBatch(
            step_id=plan.step_id,
            mode=ForwardMode.EXTEND if plan.is_extend else ForwardMode.DECODE,
            req_pool_indices=long_tensors[0],
            seq_lens=int_tensors[0],
            positions=long_tensors[1],
            out_cache_loc=long_tensors[2],
            input_ids=long_tensors[3] if plan.is_extend else None,
            extend_lens=extend_lens,
            page_updates=int_tensors[1].view(3, -1) if len(ints) == 2 else None,
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

    def _tensors(self, arrays: list[Ints], dtype: torch.dtype) -> list[torch.Tensor]:
        if not self._pinned:
            kind = np.int64 if dtype is torch.int64 else np.int32
            return [torch.from_numpy(array.astype(kind, copy=False)) for array in arrays]
        # One block for all: each allocation costs some microseconds.
        sizes = [array.size for array in arrays]
        packed = torch.empty(sum(sizes), dtype=dtype, pin_memory=True)
        np.concatenate(arrays, out=packed.numpy(), casting="same_kind")
        return list(torch.split(packed, sizes))


def _row_init(request: Request) -> RowInit:
    needs_tokens = request.sampling.needs_penalty
    return RowInit(
        row=request.row,
        sampling=request.sampling,
        prompt_ids=request.prompt.tolist() if needs_tokens else None,
        output_ids=list(request.output_ids) if needs_tokens else None,
    )
