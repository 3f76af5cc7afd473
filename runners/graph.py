"""Capturing a callable over static buffers and replaying it: the mechanism under both runners.

A backend is one memory pool and one capture stream. What a capture returns sits at addresses
that never change; every replay refreshes it. Outputs come back twice over: the tensors that
``capture`` returns own their memory in the pool, and an ``alias`` of them does not. While an
owner lives no later capture is given its memory; when it is dropped, smaller graphs reuse it,
which is why the largest size is captured first. ``RecordedGraphBackend`` in
``recorded_graph.py`` is the CPU twin. This file knows no model, batch or bucket.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch

Captured = Callable[[], Sequence[torch.Tensor]]


class CaptureError(RuntimeError):
    """The callable cannot be a graph. The message names the op, the reason and the line."""


class Graph(Protocol):
    """One captured callable.

    ``seconds`` is what the capture took, warm-ups included; ``nbytes`` how much memory the
    pool and the driver grew by.
    """

    seconds: float
    nbytes: int

    def replay(self) -> None:
        """Runs the captured work again on the tensors of the capture."""


class GraphBackend(Protocol):
    """How graphs are made on one device.

    ``keeps_tensors``: a graph holds the tensors that its function worked on, and with them
    their memory. Otherwise it only knows their addresses.
    """

    name: str
    keeps_tensors: bool

    def capture(
        self, function: Captured, *, warmups: int = 0
    ) -> tuple[Graph, tuple[torch.Tensor, ...]]:
        """Captures one call of ``function``.

        Args:
            function: works on static tensors only and returns tensors.
            warmups: eager calls before the capture, for kernels that compile or tune at
                their first launch.

        Returns:
            The graph, and the tensors ``function`` returned, at the addresses where every
            replay leaves its results.

        Raises:
            CaptureError: ``function`` reads values on the host, has data-dependent shapes,
                draws unseeded random numbers or moves data between devices. On CUDA the pool
                is not usable afterwards.
            torch.OutOfMemoryError: no room. The backend stays usable.
        """

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same memory, without keeping it from later captures."""

    def pool_bytes(self) -> int:
        """Bytes of the pool."""


class CudaGraph:
    """A ``torch.cuda.CUDAGraph`` with its measurements."""

    def __init__(self, graph: torch.cuda.CUDAGraph, seconds: float, nbytes: int) -> None:
        self._graph = graph
        self.seconds = seconds
        self.nbytes = nbytes

    def replay(self) -> None:
        self._graph.replay()


class CudaGraphBackend:
    """CUDA graphs in one private pool, captured on ``stream``.

    Sharing the pool is safe because all graphs are replayed on one stream, one at a time; the
    allocator reuses a block only on the stream that it was made for, hence the one stream.
    """

    name = "cuda"
    keeps_tensors = False

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._pool = torch.cuda.graph_pool_handle()
        self._nbytes = 0

    def capture(
        self, function: Captured, *, warmups: int = 0
    ) -> tuple[CudaGraph, tuple[torch.Tensor, ...]]:
        started = time.perf_counter()
        with torch.cuda.stream(self._stream), torch.no_grad():
            for _ in range(warmups):
                torch.cuda.synchronize()
                function()
            torch.cuda.synchronize()
            free_before = torch.cuda.mem_get_info()[0]
            graph = torch.cuda.CUDAGraph()
            outputs = self._capture_once(graph, function)
            torch.cuda.synchronize()
        # other processes may free memory meanwhile
        nbytes = max(0, free_before - torch.cuda.mem_get_info()[0])
        self._nbytes += nbytes
        return CudaGraph(graph, time.perf_counter() - started, nbytes), outputs

    def _capture_once(
        self, graph: torch.cuda.CUDAGraph, function: Captured
    ) -> tuple[torch.Tensor, ...]:
        # Not torch.cuda.graph(): it collects garbage and empties the cache at every capture,
        # and prefill makes (layers + 1) x levels of them.
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            outputs = tuple(function())
        except BaseException as error:
            try:
                graph.capture_end()
            except RuntimeError as second:
                error.add_note(f"ending the capture failed too: {second}")
            raise self._explain(error) from error
        graph.capture_end()
        return outputs

    @staticmethod
    def _explain(error: BaseException) -> BaseException:
        forbidden = isinstance(error, RuntimeError) and "captur" in str(error)
        if forbidden and not isinstance(error, torch.OutOfMemoryError):
            return CaptureError(f"the forward cannot be captured: {error}")
        return error

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.numel() == 0:
            return tensor
        integers = torch.as_tensor(_CudaMemory(tensor), device=tensor.device)
        return integers.view(tensor.dtype)

    def pool_bytes(self) -> int:
        return self._nbytes


class _CudaMemory:
    """Device memory by address, in the form that ``torch.as_tensor`` wraps without a copy and
    without owning it."""

    _TYPES = {1: "|u1", 2: "<i2", 4: "<i4", 8: "<i8"}  # noqa: RUF012  (read only)

    def __init__(self, tensor: torch.Tensor) -> None:
        size = tensor.element_size()
        self.__cuda_array_interface__ = {
            "version": 2,
            # dtypes that NumPy lacks, such as bfloat16, travel as integers of their size
            "typestr": self._TYPES[size],
            "shape": tuple(tensor.shape),
            "strides": tuple(stride * size for stride in tensor.stride()),
            "data": (tensor.data_ptr(), False),
        }


@contextmanager
def freeze_gc() -> Iterator[None]:
    """Keeps the garbage collector from walking the model at every capture. Nothing is left to do
    where it is off, as in an engine that starts."""
    if not gc.isenabled():
        yield
        return
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        gc.collect()


def is_out_of_memory(error: BaseException) -> bool:
    """True for the allocator's error and for the driver's own, raised at instantiation."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and "out of memory" in str(error)
