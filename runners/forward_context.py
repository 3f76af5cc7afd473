"""What the opaque layer ops read while a forward, a graph capture or a piece runs.

No per-step tensor is an argument of the compiled forward: the attention op and the KV write
find the batch they work on here. This file knows no model and no runner; it only holds the
current context of the calling thread.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from duograph.kernels.attention.base import AttentionBackend, AttentionMetadata
from duograph.runners.batch import ForwardMode
from duograph.runners.kv_pool import KVPool


@dataclass(slots=True)
class ForwardContext:
    """Everything a layer op needs beside its own tensors.

    Attributes:
        meta: the step's view of the KV pool. In a graph its tensors are the static buffers.
        mode: decides between the backend's ``decode`` and ``extend``.
        kv_pool: the keys and values of every layer.
        backend: the attention kernels.
        cos_sin: float32 [context_length, head_dim], cosines then sines of each position.
    """

    meta: AttentionMetadata
    mode: ForwardMode
    kv_pool: KVPool
    backend: AttentionBackend
    cos_sin: torch.Tensor


class _Current(threading.local):
    context: ForwardContext | None = None


# One context per thread: forwards run on the worker's thread, captures on the main one.
_CURRENT = _Current()


@contextmanager
def use_context(context: ForwardContext) -> Iterator[ForwardContext]:
    """Makes ``context`` the current one of this thread; the one before returns afterwards."""
    before = _CURRENT.context
    _CURRENT.context = context
    try:
        yield context
    finally:
        _CURRENT.context = before


def peek() -> ForwardContext | None:
    """The context of the forward that is running on this thread, if one is."""
    return _CURRENT.context


def current() -> ForwardContext:
    """The context of the forward that is running.

    Raises:
        RuntimeError: no forward is running on this thread.
    """
    context = _CURRENT.context
    if context is None:
        raise RuntimeError("a layer op ran outside of use_context(): no forward is in progress")
    return context
