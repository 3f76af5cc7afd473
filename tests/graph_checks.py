"""Equivalence checks of the graph runners, the same on CPU and CUDA: a replay against the same
callable run eagerly over the same padded buffers, and against padding that holds other things.

Everything is compared bit by bit: same shapes and kernels leave no room for rounding. So a NaN
equals itself, and a pool full of NaN shows whoever reads a slot that is not his."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from duograph.runners.batch import ForwardBatch, ForwardMode
from duograph.runners.buckets import padded_size
from duograph.runners.cuda_graph_runner import CudaGraphRunner
from duograph.runners.forward_context import use_context
from duograph.runners.models.llama import CausalLM
from duograph.runners.parts import RunnerParts
from duograph.runners.piecewise_cuda_graph_runner import PiecewiseCudaGraphRunner
from duograph.runners.runner_set import RunnerSet
from duograph.runners.streams import CudaStream
from duograph.runners.worker import ModelWorker

State = tuple[list[torch.Tensor], torch.Tensor]


def runners_of(worker: ModelWorker) -> RunnerSet:
    assert worker._runners is not None
    return worker._runners


def model_of(worker: ModelWorker) -> CausalLM:
    return worker._model


def decode_runner(worker: ModelWorker) -> CudaGraphRunner:
    runner = runners_of(worker).decode
    assert runner is not None
    return runner


def prefill_runner(worker: ModelWorker) -> PiecewiseCudaGraphRunner:
    runner = runners_of(worker).prefill
    assert runner is not None
    return runner


@contextmanager
def on_stream(worker: ModelWorker) -> Iterator[None]:
    """Direct calls must be ordered with what the worker launches."""
    stream = worker._stream
    if not isinstance(stream, CudaStream):
        yield
        return
    with torch.cuda.stream(stream.stream):
        yield
    stream.stream.synchronize()


def snapshot(parts: RunnerParts) -> State:
    pool = [tensor.clone() for tensor in (*parts.kv_pool.k, *parts.kv_pool.v)]
    return pool, parts.table.next_tokens.clone()


def restore(parts: RunnerParts, state: State) -> None:
    for tensor, saved in zip((*parts.kv_pool.k, *parts.kv_pool.v), state[0], strict=True):
        tensor.copy_(saved)
    parts.table.next_tokens.copy_(state[1])


def without_dummy(state: State) -> list[torch.Tensor]:
    """The whole pool but slot 0, which padding may write."""
    return [tensor[1:] for tensor in state[0]]


def same(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    """Bit for bit: -0 is not 0, and NaN equals itself."""
    return all(torch.equal(bits(a), bits(b)) for a, b in zip(first, second, strict=True))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Floats as integers of their size."""
    sizes = {1: torch.int8, 2: torch.int16, 4: torch.int32}
    return tensor.view(sizes[tensor.itemsize]) if tensor.is_floating_point() else tensor


def fill_pool(worker: ModelWorker, fill: Callable[[torch.Tensor], object]) -> None:
    """Every slot of every layer, the dummy's too."""
    pool = runners_of(worker).parts.kv_pool
    with torch.no_grad(), on_stream(worker):
        for tensor in (*pool.k, *pool.v):
            fill(tensor)


def replay_faults(worker: ModelWorker, batch: ForwardBatch) -> list[str]:
    """What is wrong with the replay of ``batch``, if anything: bits that differ from eager's at
    the same padded size or from another replay's, or that depend on what the padding reads; and
    slots written that are not the batch's. The step has run once more afterwards."""
    runs = {name: results_with_dummy_slot(worker, batch, fill) for name, fill in FILLS.items()}
    replayed, eager = replay_and_eager(worker, batch)
    faults = [] if same(replayed, eager) else ["other bits than eager"]
    if replayed[0].isnan().any():
        faults.append("NaN")
    for name, (results, changed) in runs.items():
        if not same(results, replayed):
            faults.append(f"other bits with {name} in the dummy slot")
        if changed != batch.num_tokens:
            faults.append(f"{changed} slots written")
    return faults


def replay_and_eager(
    worker: ModelWorker, batch: ForwardBatch
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """(results of the runner's replay, results of the same step run eagerly over the same padded
    buffers): logits, tokens if decode, and the pool without the dummy slot."""
    parts = runners_of(worker).parts
    decode = batch.mode is ForwardMode.DECODE
    runner = decode_runner(worker) if decode else prefill_runner(worker)
    eagerly = _decode_eagerly if decode else _extend_eagerly
    assert runner.refusal(batch) is None
    with torch.no_grad(), on_stream(worker):
        before = snapshot(parts)
        replayed = _results(parts, lambda: _logits_and_tokens(runner.run(batch)))
        restore(parts, before)
        expected = _results(parts, lambda: eagerly(worker, batch))
    return replayed, expected


def _results(parts: RunnerParts, run: Callable[[], list[torch.Tensor]]) -> list[torch.Tensor]:
    outputs = [tensor.clone() for tensor in run()]
    return [*outputs, *without_dummy(snapshot(parts))]


def _logits_and_tokens(output: Any) -> list[torch.Tensor]:
    return [tensor for tensor in (output.logits, output.tokens) if tensor is not None]


def _decode_eagerly(worker: ModelWorker, batch: ForwardBatch) -> list[torch.Tensor]:
    runner, parts = decode_runner(worker), runners_of(worker).parts
    size = padded_size(runner.sizes, batch.batch_size)
    assert size is not None
    parts.load(batch, size)
    context = parts.decode_context(size)
    parts.attention.prepare(context.meta)
    with use_context(context):
        logits, tokens = runner.step(size, runner.forward_for(size))
    return [logits[: batch.batch_size], tokens[: batch.batch_size]]


def _extend_eagerly(worker: ModelWorker, batch: ForwardBatch) -> list[torch.Tensor]:
    runner, parts = prefill_runner(worker), runners_of(worker).parts
    size = padded_size(runner.sizes, batch.num_tokens)
    assert size is not None
    parts.load(batch, size)
    inputs = parts.buffers.extend_inputs(size)
    context = parts.extend_context(batch, size)
    parts.attention.prepare(context.meta)
    ends = torch.tensor(batch.extend_lens).cumsum(0) - 1
    with use_context(context):
        hidden = parts.model.model(inputs.input_ids, inputs.positions)
        return [parts.model.compute_logits(hidden[ends.to(hidden.device)])]


def results_with_dummy_slot(
    worker: ModelWorker, batch: ForwardBatch, fill: Callable[[torch.Tensor], object]
) -> tuple[list[torch.Tensor], int]:
    """Replays ``batch`` with the pool's slot 0 filled by ``fill``, then puts all back.

    Returns logits, tokens if decode and the pool without slot 0; and how many slots the step
    changed, slot 0 aside.
    """
    runners = runners_of(worker)
    parts = runners.parts
    runner = decode_runner(worker) if batch.mode is ForwardMode.DECODE else prefill_runner(worker)
    with torch.no_grad(), on_stream(worker):
        before = snapshot(parts)
        for tensor in (*parts.kv_pool.k, *parts.kv_pool.v):
            fill(tensor[0])
        results = _results(parts, lambda: _logits_and_tokens(runner.run(batch)))
        after = snapshot(parts)
        restore(parts, before)
    changed = torch.zeros(parts.kv_pool.num_slots - 1, dtype=torch.bool)
    for old, new in zip(without_dummy(before), without_dummy(after), strict=True):
        changed |= (bits(old) != bits(new)).flatten(1).any(1).cpu()
    return results, int(changed.sum())


FILLS: dict[str, Callable[[torch.Tensor], object]] = {
    "zeros": lambda slot: slot.zero_(),
    "random": lambda slot: slot.normal_(),
    "nan": lambda slot: slot.fill_(float("nan")),
}
