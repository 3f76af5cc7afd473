"""Attention over the paged pool in plain torch: the CPU backend, and the reference elsewhere.

It plans on the host, once per step and not per layer: the plan is kept until one of the
metadata tensors is written to (their version counters tell). Inside an opaque op the host may
be asked; so this backend is fine for CPU recordings but not for CUDA graph capture.

Masked positions are never read: their index points to the sequence's own first slot, because
an unowned slot may hold NaN and 0 * NaN is NaN.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from duograph.kernels.attention.base import AttentionMetadata

# Sequences are batched when the longest is at most this many times the shortest, so that at
# most half of what a batched step gathers is thrown away.
_MAX_LENGTH_RATIO = 2
_SMALL_LENGTH = 64  # below this, padding costs less than another group


@dataclass(frozen=True, slots=True)
class _Rows:
    """Where the keys of one group of sequences lie in the pool.

    ``slots`` is None if they are one contiguous run, which is then read without a copy.
    """

    start: int
    length: int
    slots: torch.Tensor | None  # int64 [num_sequences * length]

    def read(self, cache: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """[num_sequences, num_kv_heads, length, head_dim] in ``dtype``."""
        if self.slots is None:
            rows = cache[self.start : self.start + self.length]
        else:
            rows = cache.index_select(0, self.slots)
        return rows.view(-1, self.length, *cache.shape[1:]).transpose(1, 2).to(dtype)


@dataclass(frozen=True, slots=True)
class _DecodeGroup:
    """Sequences of similar length. ``members`` is None if they are the whole batch in order."""

    members: torch.Tensor | None  # int64 [n], batch indices
    rows: _Rows
    mask: torch.Tensor | None  # additive float32 [n, 1, 1, length]


@dataclass(frozen=True, slots=True)
class _ExtendSequence:
    """Query rows ``first`` .. ``last`` of one sequence. ``mask`` None: plain causal."""

    first: int
    last: int
    rows: _Rows
    mask: torch.Tensor | None  # additive float32 [last - first, length]


@dataclass(slots=True)
class _Plan:
    """What was computed from a metadata object, and from which state of its tensors."""

    sources: tuple[torch.Tensor, ...]
    versions: tuple[int, ...]
    num_real_tokens: int | None
    decode: list[_DecodeGroup] | None = None
    extend: list[_ExtendSequence] | None = None


class TorchBackend:
    """See ``AttentionBackend``. Keeps one plan: not for use from two threads at once."""

    name = "torch"

    def __init__(
        self, *, num_q_heads: int, num_kv_heads: int, head_dim: int, device: torch.device
    ) -> None:
        self.num_q_heads = num_q_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.device = device
        self._plan: _Plan | None = None

    def prepare(self, meta: AttentionMetadata) -> None:
        """Drops the plan of the step before; the first layer makes the new one."""
        self._plan = None

    def decode(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        meta: AttentionMetadata,
        out: torch.Tensor,
        scale: float,
    ) -> None:
        """See ``AttentionBackend.decode``. Query heads of one KV head are rows of one
        matrix, so keys are not repeated."""
        plan = self._plan_of(meta)
        if plan.decode is None:
            plan.decode = _plan_decode(meta)
        grouped = (-1, self.num_kv_heads, self.num_q_heads // self.num_kv_heads, self.head_dim)
        for group in plan.decode:
            queries = q if group.members is None else q.index_select(0, group.members)
            attended = F.scaled_dot_product_attention(
                queries.reshape(grouped),
                group.rows.read(k_cache, q.dtype),
                group.rows.read(v_cache, q.dtype),
                attn_mask=_as(group.mask, q.dtype),
                scale=scale,
            ).reshape(-1, self.num_q_heads, self.head_dim)
            if group.members is None:
                out.copy_(attended)
            else:
                out.index_copy_(0, group.members, attended)

    def extend(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        meta: AttentionMetadata,
        out: torch.Tensor,
        scale: float,
    ) -> None:
        """See ``AttentionBackend.extend``. One call per sequence: prefill is compute-bound,
        and ragged rows cost nothing this way."""
        plan = self._plan_of(meta)
        if plan.extend is None:
            plan.extend = _plan_extend(meta)
        for sequence in plan.extend:
            queries = q[sequence.first : sequence.last].transpose(0, 1).unsqueeze(0)
            attended = F.scaled_dot_product_attention(
                queries,
                sequence.rows.read(k_cache, q.dtype),
                sequence.rows.read(v_cache, q.dtype),
                attn_mask=_as(sequence.mask, q.dtype),
                is_causal=sequence.mask is None,
                scale=scale,
                enable_gqa=self.num_q_heads != self.num_kv_heads,
            )
            out[sequence.first : sequence.last].copy_(attended[0].transpose(0, 1))

    def _plan_of(self, meta: AttentionMetadata) -> _Plan:
        """The plan of this step. The kept tensors are compared by identity, so a new
        metadata object over the same buffers, unwritten since, shares it."""
        sources: tuple[torch.Tensor, ...] = (meta.page_table, meta.req_pool_indices, meta.seq_lens)
        if meta.query_start_loc is not None:
            sources += (meta.query_start_loc,)
        versions = tuple(source._version for source in sources)
        plan = self._plan
        if (
            plan is None
            or plan.versions != versions
            or plan.num_real_tokens != meta.num_real_tokens
            or len(plan.sources) != len(sources)
            or any(a is not b for a, b in zip(plan.sources, sources, strict=True))
        ):
            plan = self._plan = _Plan(sources, versions, meta.num_real_tokens)
        return plan


def _as(mask: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    return None if mask is None else mask.to(dtype)


def _plan_decode(meta: AttentionMetadata) -> list[_DecodeGroup]:
    seq_lens: list[int] = meta.seq_lens.tolist()
    order = sorted(range(len(seq_lens)), key=seq_lens.__getitem__)
    groups: list[list[int]] = []
    shortest = 0
    for i in order:
        if groups and seq_lens[i] <= max(_SMALL_LENGTH, shortest * _MAX_LENGTH_RATIO):
            groups[-1].append(i)
        else:
            groups.append([i])
            shortest = seq_lens[i]
    return [_plan_group(meta, sorted(members), seq_lens) for members in groups]


def _plan_group(meta: AttentionMetadata, members: list[int], seq_lens: list[int]) -> _DecodeGroup:
    device = meta.page_table.device
    whole = len(members) == len(seq_lens)
    indices = torch.tensor(members, dtype=torch.int64, device=device)
    if len(members) == 1:
        rows = _rows_of(meta, members[0], seq_lens[members[0]])
        return _DecodeGroup(None if whole else indices, rows, None)
    length = max(seq_lens[i] for i in members)
    table_rows = meta.req_pool_indices.index_select(0, indices)
    slots = _slots(meta.page_table.index_select(0, table_rows), length, meta.page_size)
    lens = meta.seq_lens.index_select(0, indices).unsqueeze(1)
    masked = torch.arange(length, device=device).unsqueeze(0) >= lens  # [n, length]
    slots = torch.where(masked, slots[:, :1], slots)
    mask = torch.zeros(slots.shape, device=device).masked_fill_(masked, float("-inf"))
    return _DecodeGroup(
        members=None if whole else indices,
        rows=_Rows(0, length, slots.reshape(-1)),
        mask=mask.view(len(members), 1, 1, length),
    )


def _plan_extend(meta: AttentionMetadata) -> list[_ExtendSequence]:
    if meta.query_start_loc is None:
        raise ValueError("extend needs query_start_loc in the attention metadata")
    seq_lens: list[int] = meta.seq_lens.tolist()
    starts: list[int] = meta.query_start_loc.tolist()
    end = starts[-1] if meta.num_real_tokens is None else meta.num_real_tokens
    planned = []
    for i, seq_len in enumerate(seq_lens):
        first, last = starts[i], min(starts[i + 1], end)
        if first >= last:
            continue  # a padding sequence without rows
        # Rows cut off by num_real_tokens are the last ones of the sequence.
        length = seq_len - (starts[i + 1] - last)
        mask = None
        if length > last - first:
            shape = (last - first, length)
            mask = torch.full(shape, float("-inf"), device=meta.page_table.device)
            mask = mask.triu_(diagonal=length - (last - first) + 1)
        planned.append(_ExtendSequence(first, last, _rows_of(meta, i, length), mask))
    return planned


def _rows_of(meta: AttentionMetadata, index: int, length: int) -> _Rows:
    """The rows of one sequence; without a gather if its pages follow one another."""
    num_pages = -(-length // meta.page_size)
    row = meta.page_table[meta.req_pool_indices[index], :num_pages]
    pages: list[int] = row.tolist()
    if pages == list(range(pages[0], pages[0] + num_pages)):
        return _Rows(pages[0] * meta.page_size, length, None)
    return _Rows(0, length, _slots(row.unsqueeze(0), length, meta.page_size).reshape(-1))


def _slots(pages: torch.Tensor, length: int, page_size: int) -> torch.Tensor:
    """int64 [n, length]: the pool slot of each of the first ``length`` positions, given the
    rows' page ids [n, max_pages]."""
    first = pages[:, : -(-length // page_size)].to(torch.int64) * page_size
    offsets = torch.arange(page_size, device=pages.device)
    return (first.unsqueeze(2) + offsets).view(pages.shape[0], -1)[:, :length]
