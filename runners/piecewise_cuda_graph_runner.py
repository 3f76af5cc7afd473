"""Prefill: captured pieces per token level, with attention run eagerly between them.

The pieces see padded static buffers; the split ops see the real batch. So a step of any mix of
sequences and lengths replays the same pieces, and only the number of tokens picks the level.
Padding tokens are token 0 at position 0, written to KV slot 0. This file knows neither how
the forward is cut (``piecewise.py``) nor how a piece is captured (``graph.py``).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from duograph.runners.batch import ForwardBatch, ForwardMode, ForwardOutput, dummy_batch
from duograph.runners.buckets import padded_size
from duograph.runners.capture import Progress, SizeStats, Wording, capture_largest_first
from duograph.runners.forward_context import ForwardContext, use_context
from duograph.runners.graph import Graph, GraphBackend
from duograph.runners.parts import RunnerParts
from duograph.runners.piece_sequence import PieceSequence
from duograph.runners.piecewise import Cutter

WARMUPS = 1
TRACE_TOKENS = 8

PREFILL_WORDING = Wording(
    phase="capturing_prefill",
    title="piecewise CUDA graph",
    unit="num_tokens",
    shrink_flag="--piecewise-cuda-graph-max-tokens",
    disable_flag="--disable-piecewise-cuda-graph",
)


@dataclass(slots=True)
class _Level:
    pieces: PieceSequence
    context: ForwardContext  # of the capture
    stats: SizeStats


class PiecewiseCudaGraphRunner:
    """Binary search, pad, copy, run the pieces, slice.

    Attributes:
        sizes: captured token levels, ascending; empty before ``capture``.
        dropped: levels for which there was no memory.
    """

    def __init__(
        self,
        *,
        parts: RunnerParts,
        backend: GraphBackend,
        cutter: Cutter,
        levels_to_capture: tuple[int, ...],
    ) -> None:
        self._parts = parts
        self._backend = backend
        self._warmups = WARMUPS if parts.device.type == "cuda" else 0
        self._levels: dict[int, _Level] = {}
        self.cutter = cutter
        self.levels_to_capture = levels_to_capture
        self.sizes: tuple[int, ...] = ()
        self.dropped: list[int] = []

    def prepare(self) -> None:
        """Traces and cuts the model; once, before any capture.

        Raises:
            CaptureError: the model cannot be traced in one graph.
        """
        parts, buffers = self._parts, self._parts.buffers
        buffers.reset()
        tokens = min(TRACE_TOKENS, buffers.max_tokens)
        context = self._capture_context(tokens)
        parts.attention.prepare(context.meta)
        with use_context(context):
            inputs = buffers.extend_inputs(tokens)
            self.cutter.prepare(parts.model.model, inputs.input_ids, inputs.positions)

    def capture(self, progress: Progress) -> None:
        """Captures every level, the largest first; afterwards a trace is an error.

        Raises:
            CaptureError: a piece cannot be captured.
        """
        stats, self.dropped = capture_largest_first(
            self.levels_to_capture,
            self.capture_one,
            wording=PREFILL_WORDING,
            device=self._parts.device,
            progress=progress,
        )
        self.sizes = tuple(stats)
        self.cutter.seal()

    def capture_one(self, level: int) -> SizeStats:
        """Captures the pieces of one level over dummy tokens."""
        buffers = self._parts.buffers
        buffers.reset()
        context = self._capture_context(level)
        self._parts.attention.prepare(context.meta)
        inputs = buffers.extend_inputs(level)
        with use_context(context):
            pieces = self.cutter.capture(
                self._backend, inputs.input_ids, inputs.positions, self._warmups
            )
        stats = SizeStats(seconds=pieces.seconds, nbytes=pieces.nbytes)
        self._levels[level] = _Level(pieces, context, stats)
        return stats

    def refusal(self, batch: ForwardBatch) -> str | None:
        """Why ``batch`` cannot run as pieces, as a word for a counter; None if it can."""
        if not self.sizes:
            return "not_captured"
        if batch.num_tokens > self.sizes[-1]:
            return "too_large"
        return None

    def run(self, batch: ForwardBatch) -> ForwardOutput:
        """Runs the smallest level that holds ``batch``; see ``refusal``. The first piece needs
        the tokens only and is launched before anything else is prepared.

        Raises:
            ValueError: the batch's lengths do not add up.
        """
        parts, real = self._parts, batch.num_tokens
        size = padded_size(self.sizes, real)
        assert size is not None, "refusal() was not asked"
        level = self._levels[size]
        parts.load(batch, size)
        with torch.no_grad(), use_context(level.context):
            level.pieces.start()
        context = parts.extend_context(batch, size)
        parts.attention.prepare(context.meta)
        buffers, count = parts.buffers, batch.batch_size
        with torch.no_grad(), use_context(context):
            level.pieces.finish()
            parts.table.init_counts(batch.row_inits)  # the sampler's, while the device is busy
            hidden = level.pieces.output[buffers.last_rows[:count]]
            logits = parts.model.compute_logits(hidden)
        level.stats.count(real, size)
        return ForwardOutput(
            logits=logits,
            tokens=None,
            rows=buffers.req_pool_indices[:count],
            seq_lens=buffers.seq_lens[:count],
        )

    def stats(self) -> dict[int, SizeStats]:
        return {size: self._levels[size].stats for size in self.sizes}

    def graphs(self, size: int) -> list[Graph]:
        """The pieces of one captured level, in order."""
        return self._levels[size].pieces.pieces

    def num_pieces(self) -> int:
        """Pieces of one level; 0 before capture."""
        return next((len(level.pieces.pieces) for level in self._levels.values()), 0)

    def _capture_context(self, level: int) -> ForwardContext:
        """One dummy sequence of one real token; the rest of the level is padding. A piece
        reads nothing of it but the static out_cache_loc."""
        one = dummy_batch(ForwardMode.EXTEND, 1)
        self._parts.load(one, level)
        return self._parts.extend_context(one, level)
