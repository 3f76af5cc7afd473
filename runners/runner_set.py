"""The runners of one worker over one KV pool, and the one place that picks among them.

Built twice at most: over a tiny pool, to measure memory, and over the real one. This file knows
neither how memory is planned nor what a step is for.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import asdict
from typing import Any

from duograph.runners.batch import ForwardBatch, ForwardMode
from duograph.runners.capture import Progress, SizeStats
from duograph.runners.config import GraphConfig
from duograph.runners.cuda_graph_runner import CudaGraphRunner
from duograph.runners.eager_runner import EagerRunner
from duograph.runners.graph import GraphBackend, freeze_gc
from duograph.runners.parts import RunnerParts
from duograph.runners.piecewise import Cutter
from duograph.runners.piecewise_cuda_graph_runner import PiecewiseCudaGraphRunner
from duograph.runners.sampler import Sampler
from duograph.runners.stages import StageClock

logger = logging.getLogger(__name__)

Runner = CudaGraphRunner | PiecewiseCudaGraphRunner | EagerRunner


class RunnerSet:
    """Both graph runners (None where a flag disables one) and the eager one.

    Attributes:
        eager_steps: counted by (phase, reason).
    """

    def __init__(
        self,
        *,
        parts: RunnerParts,
        sampler: Sampler,
        backend: GraphBackend,
        cutter: Cutter,
        config: GraphConfig,
        stages: StageClock | None = None,
    ) -> None:
        """``config`` is resolved: its sizes are known. ``stages`` is told of every phase."""
        self.stages = stages or StageClock()
        self.parts = parts
        self.backend = backend
        self.eager = EagerRunner(parts)
        self.decode: CudaGraphRunner | None = None
        self.prefill: PiecewiseCudaGraphRunner | None = None
        self.eager_steps: Counter[tuple[str, str]] = Counter()
        self._cutter = cutter
        if not config.disable_cuda_graph:
            assert config.cuda_graph_bs is not None
            self.decode = CudaGraphRunner(
                parts=parts,
                sampler=sampler,
                backend=backend,
                sizes_to_capture=config.cuda_graph_bs,
                exact_sizes=config.disable_cuda_graph_padding,
                compile_max_bs=config.torch_compile_max_bs if config.enable_torch_compile else 0,
            )
        if not config.disable_piecewise_cuda_graph:
            assert config.piecewise_cuda_graph_tokens is not None
            self.prefill = PiecewiseCudaGraphRunner(
                parts=parts,
                backend=backend,
                cutter=cutter,
                levels_to_capture=config.piecewise_cuda_graph_tokens,
            )

    def trace(self, progress: Progress) -> None:
        """Cuts the model into pieces, if prefill needs them."""
        if self.prefill is not None:
            progress("compiling", 0, 1)
            self.prefill.prepare()
            progress("compiling", 1, 1)
        self.stages.lap("trace")

    def capture(self, progress: Progress) -> None:
        """Both phases; prefill first, as its graphs are the larger ones and decode reuses
        their memory."""
        with freeze_gc():
            if self.prefill is not None:
                self.prefill.capture(progress)
            self.stages.lap("capture_prefill")
            if self.decode is not None:
                self.decode.capture(progress)
        self.parts.buffers.reset()
        self.stages.lap("capture_decode")

    def pick_runner(self, batch: ForwardBatch) -> Runner:
        """A decode batch that a captured size holds: decode graph; an extend batch that the
        largest level holds and that wants no prompt's logprobs: pieces; else eager, with the
        reason counted."""
        decode = batch.mode is ForwardMode.DECODE
        runner = self.decode if decode else self.prefill
        reason = runner.refusal(batch) if runner is not None else "disabled"
        if batch.sampling.prompt_logprobs:  # the graphs give one row of each sequence
            reason = "prompt_logprobs"
        if runner is not None and reason is None:
            return runner  # counted per size by the runner itself
        self._count_eager(batch, "decode" if decode else "prefill", str(reason))
        return self.eager

    def _count_eager(self, batch: ForwardBatch, phase: str, reason: str) -> None:
        self.eager_steps[phase, reason] += 1
        if self.eager_steps[phase, reason] > 1 or reason in ("disabled", "prompt_logprobs"):
            return
        decode = phase == "decode"
        size = f"batch size {batch.batch_size}" if decode else f"{batch.num_tokens} tokens"
        flag = "--cuda-graph-max-bs" if decode else "--piecewise-cuda-graph-max-tokens"
        logger.warning(
            "a %s step of %s runs without a graph (%s) and is slower; %s decides the largest. "
            "Further ones are only counted.",
            phase,
            size,
            reason,
            flag,
        )

    def stats(self) -> dict[str, Any]:
        """JSON-able: see ``ModelWorker.graph_stats``."""
        eager: dict[str, dict[str, int]] = {"decode": {}, "prefill": {}}
        for (phase, reason), count in self.eager_steps.items():
            eager[phase][reason] = count
        return {
            "backend": self.backend.name,
            "pool_bytes": self.backend.pool_bytes(),
            "recompiles": self._cutter.recompiles,
            "decode": _phase_stats(self.decode),
            "prefill": _phase_stats(self.prefill)
            | {
                "cutter": self._cutter.name,
                "pieces": 0 if self.prefill is None else self.prefill.num_pieces(),
            },
            "eager_steps": eager,
        }


def _phase_stats(runner: CudaGraphRunner | PiecewiseCudaGraphRunner | None) -> dict[str, Any]:
    sizes: dict[int, SizeStats] = {} if runner is None else runner.stats()
    return {
        "enabled": runner is not None,
        "sizes": {str(size): asdict(stats) for size, stats in sizes.items()},
        "dropped": [] if runner is None else list(runner.dropped),
    }
