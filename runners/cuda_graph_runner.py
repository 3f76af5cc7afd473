"""Decode: one full graph per batch size, from the last tokens to the next ones.

Loading a step takes the input tokens from ``next_tokens[row]``; a replay runs the model, computes
logits, samples plainly and leaves the result there again, so one step needs nothing from the host
but one small block of inputs. Logits of all sizes lie in the same pool memory: they are good until
the next replay. What a request asks beyond plain sampling is the sampler's work after the replay.
This file knows no graph mechanism (see ``graph.py``) and no request.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from duograph.runners.batch import ForwardBatch, ForwardOutput
from duograph.runners.buckets import padded_size
from duograph.runners.capture import Progress, SizeStats, Wording, capture_largest_first
from duograph.runners.forward_context import ForwardContext, use_context
from duograph.runners.graph import Graph, GraphBackend
from duograph.runners.parts import RunnerParts, Transformer
from duograph.runners.sampler import Sampler

WARMUPS = 1  # kernels compile or load at their first launch

DECODE_WORDING = Wording(
    phase="capturing_decode",
    title="cuda graph",
    unit="bs",
    shrink_flag="--cuda-graph-max-bs",
    disable_flag="--disable-cuda-graph",
)


@dataclass(slots=True)
class _Entry:
    graph: Graph
    logits: torch.Tensor  # [size, vocab], alias of pool memory
    tokens: torch.Tensor  # int64 [size], likewise
    context: ForwardContext
    stats: SizeStats


class CudaGraphRunner:
    """Bisect, pad, copy, replay, slice.

    Attributes:
        sizes: captured batch sizes, ascending; empty before ``capture``.
        dropped: sizes for which there was no memory.
    """

    def __init__(
        self,
        *,
        parts: RunnerParts,
        sampler: Sampler,
        backend: GraphBackend,
        sizes_to_capture: tuple[int, ...],
        exact_sizes: bool = False,
        compile_max_bs: int = 0,
    ) -> None:
        """
        Args:
            exact_sizes: replay a batch only at a size that was captured (no padding).
            compile_max_bs: up to this size the forward in the graph is compiled by Inductor.
        """
        self._parts = parts
        self._sampler = sampler
        self._backend = backend
        self._exact = exact_sizes
        self._compile_max_bs = compile_max_bs
        self._compiled: Transformer | None = None
        self._warmups = WARMUPS if parts.device.type == "cuda" else 0
        self._entries: dict[int, _Entry] = {}
        self.sizes_to_capture = sizes_to_capture
        self.sizes: tuple[int, ...] = ()
        self.dropped: list[int] = []

    def capture(self, progress: Progress) -> None:
        """Captures every size, the largest first.

        Raises:
            CaptureError: the model cannot be captured.
        """
        stats, self.dropped = capture_largest_first(
            self.sizes_to_capture,
            self.capture_one,
            wording=DECODE_WORDING,
            device=self._parts.device,
            progress=progress,
        )
        self.sizes = tuple(stats)

    def capture_one(self, size: int) -> SizeStats:
        """Captures one size over dummy rows."""
        parts = self._parts
        parts.buffers.reset()
        context = parts.decode_context(size)
        parts.attention.prepare(context.meta)
        forward = self.forward_for(size)
        with use_context(context):
            graph, outputs = self._backend.capture(
                lambda: self.step(size, forward), warmups=self._warmups
            )
        logits, tokens = (self._backend.alias(output) for output in outputs)
        stats = SizeStats(seconds=graph.seconds, nbytes=graph.nbytes)
        self._entries[size] = _Entry(graph, logits, tokens, context, stats)
        return stats

    def step(self, size: int, forward: Transformer) -> tuple[torch.Tensor, torch.Tensor]:
        """What a graph holds: one decode step over the first ``size`` rows of the buffers.

        Returns logits [size, vocab] and the sampled int64 tokens [size].
        """
        buffers = self._parts.buffers
        hidden = forward(buffers.decode_ids[:size], buffers.decode_positions[:size])
        logits = self._parts.model.compute_logits(hidden)
        # stores the tokens, too: 0 for the dummy row, where padding rows meet
        tokens = self._sampler.sample_plain(
            logits, buffers.req_pool_indices[:size], buffers.seq_lens[:size]
        )
        return logits, tokens

    def refusal(self, batch: ForwardBatch) -> str | None:
        """Why ``batch`` cannot be replayed, as a word for a counter; None if it can."""
        if not self.sizes:
            return "not_captured"
        if batch.batch_size > self.sizes[-1]:
            return "too_large"
        if self._exact and batch.batch_size not in self._entries:
            return "not_captured"
        return None

    def run(self, batch: ForwardBatch) -> ForwardOutput:
        """Replays the smallest graph that holds ``batch``; see ``refusal``."""
        real = batch.batch_size
        size = padded_size(self.sizes, real)
        assert size is not None, "refusal() was not asked"
        entry = self._entries[size]
        buffers = self._parts.buffers
        # Static buffers are refilled on the stream that replays, so this cannot overtake the
        # replay before it, which may still be reading them.
        self._parts.load(batch, size)
        self._parts.table.init_counts(batch.row_inits)
        meta = entry.context.meta
        meta.seq_lens_cpu = buffers.seq_lens_cpu[:size]
        self._parts.attention.prepare(meta)
        entry.graph.replay()
        entry.stats.count(real, size)
        return ForwardOutput(
            logits=entry.logits[:real],
            tokens=entry.tokens[:real],
            rows=buffers.req_pool_indices[:real],
            seq_lens=buffers.seq_lens[:real],
        )

    def stats(self) -> dict[int, SizeStats]:
        return {size: self._entries[size].stats for size in self.sizes}

    def graphs(self, size: int) -> list[Graph]:
        """The one graph of a captured size."""
        return [self._entries[size].graph]

    def forward_for(self, size: int) -> Transformer:
        """The forward that the graph of ``size`` holds."""
        if size > self._compile_max_bs:
            return self._parts.model.decode_forward(size)
        if self._compiled is None:
            # one compilation per size is intended here, not a guard failure
            dynamo = torch._dynamo.config
            dynamo.recompile_limit = max(dynamo.recompile_limit, len(self.sizes_to_capture) + 8)
            self._compiled = torch.compile(self._parts.model.model, fullgraph=True, dynamic=False)
        return self._compiled
