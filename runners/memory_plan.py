"""How many KV pages there is room for.

On CUDA everything that will need memory beside the pool is measured first, over a pool of two
pages: the peak of the largest eager steps, and the graphs, by capturing the largest few sizes of
each phase and throwing them away. What is left is the pool. On the CPU graphs share the allocator
with everything else and a modest share of free memory is taken. This file knows no request.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from duograph.runners.batch import ForwardMode, dummy_batch
from duograph.runners.capture import SizeStats
from duograph.runners.config import RunnerConfig
from duograph.runners.kv_pool import KVLayout
from duograph.runners.memory import GIB, available_bytes, total_bytes
from duograph.runners.runner_set import RunnerSet
from duograph.runners.sampler import Sampler

MIB = 1 << 20
CPU_SHARE = 0.25
CPU_LIMIT = GIB  # about 45,000 tokens of the default model; --max-total-tokens asks for more
_SAMPLES = 4  # sizes of a phase that are captured to measure them
CUDA_RESERVE = 512 * MIB  # libraries, fragmentation, what no measurement has seen


class MemoryPlanError(RuntimeError):
    """There is no room for a useful KV pool."""


@dataclass(frozen=True, slots=True)
class Needs:
    """Bytes that the pool has to leave free."""

    activations: int
    decode_graphs: int
    prefill_graphs: int

    @property
    def total(self) -> int:
        return self.activations + self.decode_graphs + self.prefill_graphs


class GraphPhase(Protocol):
    """A runner, as far as measuring it goes."""

    def capture_one(self, size: int) -> SizeStats: ...


def plan_pages(
    config: RunnerConfig, layout: KVLayout, device: torch.device, needs: Needs, weights: int
) -> int:
    """Pages of the pool, including the dummy page 0.

    Args:
        config: resolved; ``max_total_tokens`` wins over everything, ``mem_fraction_static``
            over the automatic choice.
        weights: bytes of the model, which count towards ``mem_fraction_static`` on the CPU.

    Raises:
        MemoryPlanError: not even one request of one page fits.
    """
    if config.max_total_tokens is not None:
        return -(-config.max_total_tokens // layout.page_size) + 1
    assert config.max_running_requests is not None and config.context_length is not None
    free = available_bytes(device)
    if config.mem_fraction_static is not None:
        static = int(total_bytes(device) * config.mem_fraction_static)
        used = total_bytes(device) - free if device.type == "cuda" else weights
        budget = min(static - used, free)
    elif device.type == "cuda":
        budget = free - needs.total - CUDA_RESERVE
    else:
        budget = min(int(free * CPU_SHARE), CPU_LIMIT)
    return pages_within(budget, config, layout)


def pages_within(budget: int, config: RunnerConfig, layout: KVLayout) -> int:
    """Pages that ``budget`` bytes hold, including the dummy page 0. Raises MemoryPlanError."""
    assert config.max_running_requests is not None and config.context_length is not None
    # more than every request at full length can never be used
    useful = config.max_running_requests * -(-config.context_length // layout.page_size)
    pages = min(budget // layout.bytes_per_page, useful)
    if pages < 1:
        raise MemoryPlanError(
            f"out of memory: {budget / GIB:.2f} GB are left for the KV pool, one page takes "
            f"{layout.bytes_per_page / MIB:.2f} MB; raise --mem-fraction-static (now "
            f"{config.mem_fraction_static or 'auto'}) or lower --max-running-requests, "
            "--chunked-prefill-size or --cuda-graph-max-bs"
        )
    return int(pages) + 1


def predict_graph_bytes(phase: GraphPhase, sizes: tuple[int, ...]) -> int:
    """Bytes of all ``sizes``: what the largest took, and for each other one what the next largest
    took on top of it, since graphs share one pool. Of those a few are measured, because the
    device counts its memory in steps as large as one of them."""
    largest_first = sorted(sizes, reverse=True)
    measured = [phase.capture_one(size).nbytes for size in largest_first[:_SAMPLES]]
    if len(measured) < 2:
        return sum(measured)
    others = measured[1:]
    each = max(-(-sum(others) // len(others)), MIB)
    return measured[0] + each * (len(largest_first) - 1)


def measure_needs(runners: RunnerSet, sampler: Sampler, config: RunnerConfig) -> Needs:
    """What the steps and graphs of ``runners`` take, on CUDA. Traces the model.

    ``runners`` is over a tiny pool, whose captures are to be thrown away. Every dummy sequence
    reads and writes the dummy page only.
    """
    assert config.chunked_prefill_size is not None and config.max_running_requests is not None
    assert config.graph.cuda_graph_bs is not None
    assert config.graph.piecewise_cuda_graph_tokens is not None
    device = runners.parts.device
    largest_steps = (
        dummy_batch(ForwardMode.EXTEND, config.chunked_prefill_size),
        dummy_batch(ForwardMode.DECODE, config.max_running_requests),
    )

    def run_largest_steps() -> None:
        for batch in largest_steps:
            sampler.finish(batch, runners.eager.run(batch))

    activations = _measure_peak(run_largest_steps, device)
    runners.stages.lap("first_steps")  # kernels are compiled or loaded here
    runners.trace(lambda phase, done, total: None)
    prefill_graphs = decode_graphs = 0
    if runners.prefill is not None:
        levels = config.graph.piecewise_cuda_graph_tokens
        prefill_graphs = predict_graph_bytes(runners.prefill, levels)
    if runners.decode is not None:
        decode_graphs = predict_graph_bytes(runners.decode, config.graph.cuda_graph_bs)
    return Needs(activations, decode_graphs, prefill_graphs)


def _measure_peak(work: Callable[[], object], device: torch.device) -> int:
    """Bytes that ``work`` holds at its peak beyond what is held now."""
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    work()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def release_cached(device: torch.device) -> None:
    """Gives what was only measured back to the device."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
