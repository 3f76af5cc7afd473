"""What every attention backend is given and what it must do.

Plain tensors only: a backend knows no request, no batch policy and no config. Kernels read the
metadata tensors on the device, so a captured graph sees new values at every replay. A backend
that plans on the host has the same lengths there too, and its ``prepare`` is called before
every step and replay.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(slots=True)
class AttentionMetadata:
    """One step's view of the paged KV pool.

    ``bs`` sequences, ``num_tokens`` query rows. Padding sequences are ordinary ones: row 0,
    seq_len 1, reading page 0.
    """

    page_table: torch.Tensor  # int32 [max_rows, max_pages]: page ids of each request row
    req_pool_indices: torch.Tensor  # int64 [bs]: request row of each sequence
    seq_lens: torch.Tensor  # int32 [bs]: length of each sequence including this step
    out_cache_loc: torch.Tensor  # int64 [num_tokens]: KV slot each new token is written to
    page_size: int
    # Extend only; None in decode, where every sequence has exactly one query row.
    query_start_loc: torch.Tensor | None = None  # int32 [bs + 1]: first query row of each
    max_extend_len: int = 1  # host-known upper bound of query rows of one sequence
    num_real_tokens: int | None = None  # extend: query rows before the padding; None = all
    # The lengths of this step again, in host memory, for backends that plan there.
    seq_lens_cpu: torch.Tensor | None = None  # int32 [bs]
    extend_lens: list[int] | None = None  # extend only: query rows of each sequence


class AttentionBackend(Protocol):
    """Reads keys and values from the pool; writing them is ``kv_write``'s job.

    Shapes: ``q`` and ``out`` are [num_tokens, num_q_heads, head_dim]; ``k_cache`` and
    ``v_cache`` are one layer's pool [num_slots, num_kv_heads, head_dim] with
    slot = page * page_size + offset. ``out`` is passed in and written; rows past
    ``num_real_tokens`` are left as they are.
    """

    name: str

    def prepare(self, meta: AttentionMetadata) -> None:
        """Host-side planning before a step or replay. A plan-free backend does nothing."""

    def decode(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        meta: AttentionMetadata,
        out: torch.Tensor,
        scale: float,
    ) -> None:
        """One query row per sequence, attending to its first ``seq_lens`` tokens."""

    def extend(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        meta: AttentionMetadata,
        out: torch.Tensor,
        scale: float,
    ) -> None:
        """Causal attention of the new rows of each sequence over its cached prefix and
        themselves: row j of sequence i sits at position seq_len - extend_len + j."""


@dataclass(frozen=True, slots=True)
class PhaseBackends:
    """The backend of each phase, often one object twice, and perhaps another one for extend steps
    of ``long_from`` query rows and more.

    Callers pick one per step and then call it directly, so that what one backend offers beyond
    the protocol is found there and nothing has to be forwarded.
    """

    decode: AttentionBackend
    extend: AttentionBackend
    long_extend: AttentionBackend | None = None
    long_from: int = 0

    def of(self, meta: AttentionMetadata) -> AttentionBackend:
        """The backend of the step that ``meta`` describes."""
        if meta.query_start_loc is None:
            return self.decode
        rows = meta.out_cache_loc.shape[0] if meta.num_real_tokens is None else meta.num_real_tokens
        if self.long_extend is not None and rows >= self.long_from:
            return self.long_extend
        return self.extend

    def prepare(self, meta: AttentionMetadata) -> None:
        """See ``AttentionBackend.prepare``."""
        self.of(meta).prepare(meta)
