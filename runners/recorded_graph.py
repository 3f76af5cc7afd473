"""The CPU twin of a CUDA graph: the ATen ops of one call, recorded and replayed as a flat list.

It lives under the three constraints of a CUDA graph, so that a model which records also
captures: shapes are those of the recording, tensors that were not made inside it are constants
at fixed addresses, and recording refuses whatever would need the host in the middle (reading a
value, a data-dependent shape, an unseeded draw, a move between devices). A custom op is one
node. Opaque ops see the forward context of the capture at every replay, as a captured kernel
sees the pointers of its capture.

Theory: tensors and other arguments live in numbered slots. A constant's slot is filled once;
a value's slot is filled by the node that makes it and cleared after the last node that reads
it, which frees its memory. Views of constants are constants. Results are copied to memory of
the pool that keeps its address, storage by storage, so that outputs which alias each other
still do. This file knows no model, batch or bucket.
"""

from __future__ import annotations

import time
import weakref
from functools import partial
from typing import Any

import torch

from duograph.runners import forward_context
from duograph.runners.graph import Captured
from duograph.runners.recorder import HostReadGuard, Node, Recorder


class RecordedGraph:
    """A recording; see the head of this file."""

    def __init__(self, nodes: list[Node], slots: list[Any], seconds: float, nbytes: int) -> None:
        self._nodes = nodes
        self._slots = slots
        self._context = forward_context.peek()
        self.seconds = seconds
        self.nbytes = nbytes

    @property
    def num_nodes(self) -> int:
        return len(self._nodes)

    def replay(self) -> None:
        with torch.no_grad():
            if self._context is None:
                self._run()
            else:
                with forward_context.use_context(self._context):
                    self._run()

    def _run(self) -> None:
        slots = self._slots
        for node in self._nodes:
            result = node.function(*node.arguments(slots))
            outputs = node.outputs
            if len(outputs) == 1:
                if outputs[0] is not None:
                    slots[outputs[0]] = result
            else:
                for slot, value in zip(outputs, result, strict=False):
                    if slot is not None:
                        slots[slot] = value
            result = None
            for slot in node.dead:
                slots[slot] = None


class MemoryPool:
    """Blocks of host memory that captures share, as graphs share a CUDA pool."""

    def __init__(self) -> None:
        self._free: list[torch.Tensor] = []
        self.nbytes = 0

    def take(self, nbytes: int) -> torch.Tensor:
        """A uint8 block of at least ``nbytes``: the smallest free one, or a new one."""
        fitting = [block for block in self._free if block.numel() >= nbytes]
        if fitting:
            block = min(fitting, key=torch.Tensor.numel)
            # by identity: tensors compare element by element
            self._free = [other for other in self._free if other is not block]
            return block
        self.nbytes += nbytes
        return torch.zeros(nbytes, dtype=torch.uint8)

    def give_back(self, block: torch.Tensor) -> None:
        self._free.append(block)


class _Lease:
    """Gives a block back when the last of its owning tensors is gone."""

    def __init__(self, pool: MemoryPool, block: torch.Tensor, owners: int) -> None:
        self._pool = pool
        self._block = block
        self._owners = owners

    def drop(self) -> None:
        self._owners -= 1
        if self._owners == 0:
            self._pool.give_back(self._block)


class RecordedGraphBackend:
    """Records on the CPU. Every capture shares one pool."""

    name = "recorded"
    keeps_tensors = True

    def __init__(self) -> None:
        self._pool = MemoryPool()

    def capture(
        self, function: Captured, *, warmups: int = 0
    ) -> tuple[RecordedGraph, tuple[torch.Tensor, ...]]:
        started = time.perf_counter()
        bytes_before = self._pool.nbytes
        with torch.no_grad():
            for _ in range(warmups):
                function()
            recorder = Recorder()
            with HostReadGuard(recorder), recorder:
                results = tuple(function())
            outputs = self._fix(recorder, results)
        nodes, slots = recorder.finish()
        seconds = time.perf_counter() - started
        graph = RecordedGraph(nodes, slots, seconds, self._pool.nbytes - bytes_before)
        return graph, outputs

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        # a view: the same storage in another tensor object, which no lease watches
        return tensor.detach()

    def pool_bytes(self) -> int:
        return self._pool.nbytes

    def _fix(
        self, recorder: Recorder, results: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, ...]:
        """Gives every result that is made anew at each replay an address of its own."""
        by_storage: dict[int, list[int]] = {}
        for index, tensor in enumerate(results):
            if recorder.is_value(tensor):
                by_storage.setdefault(tensor.untyped_storage().data_ptr(), []).append(index)
        outputs = list(results)
        for indices in by_storage.values():
            block = self._pool.take(results[indices[0]].untyped_storage().nbytes())
            recorder.add_call(partial(_copy_storage, block), results[indices[0]])
            _copy_storage(block, results[indices[0]])
            lease = _Lease(self._pool, block, len(indices))
            for index in indices:
                outputs[index] = _view_of(block, results[index])
                weakref.finalize(outputs[index], lease.drop).atexit = False
        return tuple(outputs)


def _copy_storage(block: torch.Tensor, source: torch.Tensor) -> None:
    data = torch.empty(0, dtype=torch.uint8).set_(source.untyped_storage())
    block[: data.numel()].copy_(data)


def _view_of(block: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A tensor with the layout of ``like`` on the memory of ``block``."""
    return torch.empty(0, dtype=like.dtype).set_(
        block.untyped_storage(), like.storage_offset(), like.size(), like.stride()
    )
