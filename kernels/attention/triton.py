"""Plan-free paged attention for CUDA, in Triton: split-KV decode and causal extend.

Both kernels read lengths, request rows and page ids on the device, so one captured graph serves
every later step and nothing is planned on the host. Queries that share a KV head are packed
into one tile, so every key and value is read once per group.

Decode gives each (KV head, sequence) a fixed number of programs; each derives its own stretch of
the sequence from the length on the device, and a second kernel joins the partial results with
the usual log-sum-exp weights. This file knows no batch, request, layer or graph.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from duograph.kernels.attention.base import AttentionMetadata

_LOG2_E = math.log2(math.e)
_MIN_DOT_ROWS = 16  # smallest tile edge tl.dot takes
_MAX_SPLITS = 64
_MIN_CHUNK = 128  # tokens; below this a split costs more than it hides
_LONG_CHUNK = 2048  # tokens; chunk when only very long sequences are split


@dataclass(frozen=True, slots=True)
class TileConfig:
    """Launch shape of one kernel. ``block_m`` (query rows) is fixed by the group in decode."""

    block_n: int  # keys per step of the loop
    num_warps: int
    num_stages: int  # depth of the load pipeline
    block_m: int = _MIN_DOT_ROWS


@dataclass(frozen=True, slots=True)
class SplitPlan:
    """How decode cuts sequences: at most ``num_splits`` chunks of at least ``min_chunk``."""

    num_splits: int
    min_chunk: int


def plan_splits(programs: int, max_len: int, target_programs: int) -> SplitPlan:
    """Chooses the split of one batch size from host-known shapes only.

    Args:
        programs: sequences times KV heads, the programs there are without splitting.
        max_len: longest sequence the page table can describe, in tokens.
        target_programs: programs that fill the device.
    """
    wanted = triton.cdiv(target_programs, programs)
    if wanted >= 2:
        fitting = triton.cdiv(max_len, _MIN_CHUNK)
        return SplitPlan(max(1, min(wanted, fitting, _MAX_SPLITS)), _MIN_CHUNK)
    # The batch fills the device, but one very long sequence would still run alone at the end.
    return SplitPlan(max(1, min(4, max_len // (2 * _LONG_CHUNK))), _LONG_CHUNK)


def default_decode_tile(head_dim: int, dtype: torch.dtype) -> TileConfig:
    """Keeps one K and V stage near 32 KiB, so that two or more programs fit an SM."""
    row_bytes = triton.next_power_of_2(head_dim) * dtype.itemsize
    block_n = max(16, min(128, 16384 // row_bytes))
    return TileConfig(block_n=block_n, num_warps=4, num_stages=3)


def default_extend_tile(head_dim: int, dtype: torch.dtype, rows: int) -> TileConfig:
    """``rows``: query rows, group included, of the longest sequence in the step."""
    if dtype.itemsize > 2:
        return TileConfig(block_m=32, block_n=32, num_warps=4, num_stages=1)
    if head_dim > 128:
        return TileConfig(block_m=128, block_n=32, num_warps=8, num_stages=2)
    if rows <= 64:
        return TileConfig(block_m=64, block_n=64, num_warps=4, num_stages=3)
    return TileConfig(block_m=128, block_n=64, num_warps=8, num_stages=3)


class TritonBackend:
    """The ``AttentionBackend`` for any CUDA card, and the reference for faster ones.

    Takes bf16, fp16 and fp32 (fp32 at full precision), any head_dim up to 256 and any page
    size. Scratch of the split decode is allocated at the first, uncaptured, call of the largest
    batch size and lives as long as the backend, because captured graphs hold its address.
    """

    name = "triton"

    def __init__(
        self,
        *,
        num_q_heads: int,
        num_kv_heads: int,
        head_dim: int,
        device: torch.device,
        target_programs: int | None = None,
        decode_tile: TileConfig | None = None,
        extend_tile: TileConfig | None = None,
    ) -> None:
        """``target_programs`` and the tiles override what is derived from the device.

        Raises:
            ValueError: the heads do not divide, or head_dim is out of range.
        """
        if num_q_heads % num_kv_heads:
            raise ValueError(
                f"num_q_heads {num_q_heads} is not a multiple of num_kv_heads {num_kv_heads}"
            )
        if not 1 <= head_dim <= 256:
            raise ValueError(f"head_dim {head_dim} is not in [1, 256]")
        self.num_q_heads = num_q_heads
        self.num_kv_heads = num_kv_heads
        self.group = num_q_heads // num_kv_heads
        self.head_dim = head_dim
        self.device = torch.device(device)
        if target_programs is None:
            target_programs = 2 * _multiprocessors(self.device)
        self.target_programs = target_programs
        self._decode_tile = decode_tile
        self._extend_tile = extend_tile
        # Outgrown buffers stay alive: a captured graph may still write to them.
        self._scratch: list[torch.Tensor] = []

    def prepare(self, meta: AttentionMetadata) -> None:
        """Nothing to plan: everything is read on the device."""

    def decode(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        meta: AttentionMetadata,
        out: torch.Tensor,
        scale: float,
    ) -> None:
        """One query row per sequence; see ``AttentionBackend.decode``."""
        self._check(q, k_cache, v_cache, meta, out)
        bs = meta.seq_lens.shape[0]
        tile = self._decode_tile or default_decode_tile(self.head_dim, q.dtype)
        max_len = meta.page_table.shape[1] * meta.page_size
        plan = plan_splits(bs * self.num_kv_heads, max_len, self.target_programs)
        partial, lse = self._partials(bs, plan.num_splits)
        block_d = max(_MIN_DOT_ROWS, triton.next_power_of_2(self.head_dim))
        shared = {
            "HEAD_DIM": self.head_dim,
            "BLOCK_D": block_d,
            "BLOCK_N": tile.block_n,
        }
        _decode_kernel[(self.num_kv_heads, bs, plan.num_splits)](
            q,
            k_cache,
            v_cache,
            meta.page_table,
            meta.req_pool_indices,
            meta.seq_lens,
            out,
            partial,
            lse,
            *q.stride()[:2],
            *k_cache.stride()[:2],
            *v_cache.stride()[:2],
            *out.stride()[:2],
            meta.page_table.stride(0),
            plan.num_splits,
            plan.min_chunk,
            scale * _LOG2_E,
            GROUP=self.group,
            BLOCK_G=max(_MIN_DOT_ROWS, triton.next_power_of_2(self.group)),
            PAGE_SIZE=meta.page_size,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
            **shared,
        )
        if plan.num_splits > 1:
            _join_kernel[(self.num_q_heads, bs)](
                partial,
                lse,
                meta.seq_lens,
                out,
                *out.stride()[:2],
                plan.num_splits,
                plan.min_chunk,
                NUM_Q_HEADS=self.num_q_heads,
                BLOCK_S=triton.next_power_of_2(plan.num_splits),
                num_warps=4 if plan.num_splits > 8 else 1,
                **shared,
            )

    def extend(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        meta: AttentionMetadata,
        out: torch.Tensor,
        scale: float,
    ) -> None:
        """Causal attention over prefix and new rows; see ``AttentionBackend.extend``."""
        self._check(q, k_cache, v_cache, meta, out)
        if meta.query_start_loc is None:
            raise ValueError("extend needs AttentionMetadata.query_start_loc")
        rows = meta.max_extend_len * self.group
        tile = self._extend_tile or default_extend_tile(self.head_dim, q.dtype, rows)
        real = q.shape[0] if meta.num_real_tokens is None else meta.num_real_tokens
        blocks = triton.cdiv(rows, tile.block_m)
        _extend_kernel[(self.num_kv_heads, blocks, meta.seq_lens.shape[0])](
            q,
            k_cache,
            v_cache,
            meta.page_table,
            meta.req_pool_indices,
            meta.seq_lens,
            meta.query_start_loc,
            out,
            *q.stride()[:2],
            *k_cache.stride()[:2],
            *v_cache.stride()[:2],
            *out.stride()[:2],
            meta.page_table.stride(0),
            real,
            scale * _LOG2_E,
            GROUP=self.group,
            HEAD_DIM=self.head_dim,
            BLOCK_D=max(_MIN_DOT_ROWS, triton.next_power_of_2(self.head_dim)),
            BLOCK_M=tile.block_m,
            BLOCK_N=tile.block_n,
            PAGE_SIZE=meta.page_size,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )

    def _partials(self, bs: int, num_splits: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Scratch for the normalised partial outputs [bs, heads, splits, dim] and their base-2
        log-sum-exps [bs, heads, splits], both float32 views of one buffer."""
        cells = bs * self.num_q_heads * num_splits if num_splits > 1 else 0
        size = cells * (self.head_dim + 1)
        if not self._scratch or self._scratch[-1].numel() < size:
            # Splits fall as batches grow, so this bound holds for the usual batch sizes and the
            # first decode call is normally the only allocation.
            floor = 2 * self.target_programs * self.group * (self.head_dim + 1)
            self._scratch.append(
                torch.empty(max(size, floor), dtype=torch.float32, device=self.device)
            )
        flat = self._scratch[-1]
        split = cells * self.head_dim
        return flat[:split], flat[split:size]

    def _check(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        meta: AttentionMetadata,
        out: torch.Tensor,
    ) -> None:
        want = (self.num_q_heads, self.head_dim)
        if tuple(q.shape[1:]) != want or out.shape != q.shape:
            raise ValueError(
                f"q and out must be [num_tokens, {want[0]}, {want[1]}], "
                f"got {tuple(q.shape)} and {tuple(out.shape)}"
            )
        if tuple(k_cache.shape[1:]) != (self.num_kv_heads, self.head_dim):
            raise ValueError(
                f"k_cache must be [num_slots, {self.num_kv_heads}, {self.head_dim}], "
                f"got {tuple(k_cache.shape)}"
            )
        last = (q.stride(2), out.stride(2), k_cache.stride(2), v_cache.stride(2))
        if last != (1, 1, 1, 1) or meta.page_table.stride(1) != 1:
            raise ValueError("the last dimension of q, out, the pool and page_table must be dense")


def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":  # Triton's interpreter
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@triton.jit
def _chunk_of(
    seq_len: tl.tensor,
    num_splits: tl.tensor,
    min_chunk: tl.tensor,
    BLOCK_N: tl.constexpr,
) -> tl.tensor:
    """Tokens per split, a multiple of BLOCK_N. Decode and join must agree on it."""
    chunk = tl.maximum(tl.cdiv(seq_len, num_splits), min_chunk)
    return tl.cdiv(chunk, BLOCK_N) * BLOCK_N


@triton.jit
def _pages_of(
    table_row: tl.tensor,
    first: tl.tensor,
    offsets: tl.tensor,
    end: tl.tensor,
    PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> tl.tensor:
    """int32 page ids of positions ``first + offsets``, 0 from ``end`` on: a scalar where the
    whole tile lies in one page. ``first`` is a multiple of BLOCK_N."""
    if PAGE_SIZE % BLOCK_N == 0:
        pages = tl.load(table_row + first // PAGE_SIZE, mask=first < end, other=0)
    else:
        positions = first + offsets
        pages = tl.load(table_row + positions // PAGE_SIZE, mask=positions < end, other=0)
    return pages


@triton.jit
def _slots_of(
    pages: tl.tensor,
    first: tl.tensor,
    offsets: tl.tensor,
    PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> tl.tensor:
    """int64 pool slots [BLOCK_N] of positions ``first + offsets``."""
    if PAGE_SIZE % BLOCK_N == 0:
        slots = pages.to(tl.int64) * PAGE_SIZE + first % PAGE_SIZE + offsets
    else:
        slots = pages.to(tl.int64) * PAGE_SIZE + (first + offsets) % PAGE_SIZE
    return slots


@triton.jit
def _attend_tile(
    q: tl.tensor,  # [M, D]
    acc: tl.tensor,  # [M, D] float32
    row_max: tl.tensor,  # [M] base-2 logits
    row_sum: tl.tensor,  # [M]
    k_head: tl.tensor,
    v_head: tl.tensor,
    k_stride: tl.tensor,
    v_stride: tl.tensor,
    slots: tl.tensor,  # [N] int64
    live: tl.tensor,  # [N] keys that exist
    visible: tl.tensor,  # [M, N] or [1, N]
    qk_scale: tl.tensor,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MASKED: tl.constexpr,
) -> tl.tensor:
    """One step of online softmax. With MASKED, keys outside ``live`` are never loaded: a freed
    slot may hold NaN, and NaN times a zero weight would still poison the row."""
    dims = tl.arange(0, BLOCK_D)
    k_ptrs = k_head + slots[None, :] * k_stride + dims[:, None]
    v_ptrs = v_head + slots[:, None] * v_stride + dims[None, :]
    if HEAD_DIM != BLOCK_D:
        k = tl.load(k_ptrs, mask=live[None, :] & (dims[:, None] < HEAD_DIM), other=0.0)
    elif MASKED:
        k = tl.load(k_ptrs, mask=live[None, :], other=0.0)
    else:
        k = tl.load(k_ptrs)
    logits = tl.dot(q, k, input_precision="ieee") * qk_scale
    if MASKED:
        logits = tl.where(visible, logits, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(logits, 1))
    rescale = tl.exp2(row_max - new_max)
    weights = tl.exp2(logits - new_max[:, None])
    row_sum = row_sum * rescale + tl.sum(weights, 1)
    if HEAD_DIM != BLOCK_D:
        v = tl.load(v_ptrs, mask=live[:, None] & (dims[None, :] < HEAD_DIM), other=0.0)
    elif MASKED:
        v = tl.load(v_ptrs, mask=live[:, None], other=0.0)
    else:
        v = tl.load(v_ptrs)
    acc = acc * rescale[:, None]
    acc = tl.dot(weights.to(v.dtype), v, acc, input_precision="ieee")
    return acc, new_max, row_sum


# Only pointers to metadata: their alignment may differ between the eager step and the static
# buffers of a graph, and a second compiled variant would stall a request for seconds.
_METADATA_ARGS = ["page_table", "req_rows", "seq_lens"]
# Differ by batch size; as constants they would cost a compilation each.
_SPLIT_ARGS = ["num_splits", "min_chunk"]


@triton.jit(do_not_specialize=_SPLIT_ARGS, do_not_specialize_on_alignment=_METADATA_ARGS)
def _decode_kernel(
    q: tl.tensor,
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    page_table: tl.tensor,
    req_rows: tl.tensor,
    seq_lens: tl.tensor,
    out: tl.tensor,
    partial: tl.tensor,  # float32 [bs, heads, splits, dim]
    lse: tl.tensor,  # float32 [bs, heads, splits]
    q_stride_t: tl.tensor,
    q_stride_h: tl.tensor,
    k_stride_s: tl.tensor,
    k_stride_h: tl.tensor,
    v_stride_s: tl.tensor,
    v_stride_h: tl.tensor,
    out_stride_t: tl.tensor,
    out_stride_h: tl.tensor,
    table_stride: tl.tensor,
    num_splits: tl.tensor,
    min_chunk: tl.tensor,
    qk_scale: tl.tensor,
    GROUP: tl.constexpr,
    BLOCK_G: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
) -> None:
    """Grid (KV heads, bs, splits). Heads run fastest: their rows of a slot are neighbours in
    memory. Empty splits come last, where they fill the tail of the launch."""
    kv_head = tl.program_id(0)
    seq = tl.program_id(1)
    split = tl.program_id(2)
    seq_len = tl.load(seq_lens + seq)
    chunk = _chunk_of(seq_len, num_splits, min_chunk, BLOCK_N)
    start = split * chunk
    if start >= seq_len:
        return
    end = tl.minimum(start + chunk, seq_len)
    table_row = page_table + tl.load(req_rows + seq) * table_stride

    groups = tl.arange(0, BLOCK_G)
    dims = tl.arange(0, BLOCK_D)
    heads = kv_head * GROUP + groups
    cells = (groups[:, None] < GROUP) & (dims[None, :] < HEAD_DIM)
    q_ptrs = q + seq.to(tl.int64) * q_stride_t + heads[:, None] * q_stride_h + dims[None, :]
    q_tile = tl.load(q_ptrs, mask=cells, other=0.0)

    acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    row_max = tl.full([BLOCK_G], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_G], tl.float32)
    offsets = tl.arange(0, BLOCK_N)
    # Page ids are read one tile ahead: loads of K and V that do not wait for another load of
    # the same iteration are what lets the compiler keep several stages in flight.
    pages = _pages_of(table_row, start, offsets, end, PAGE_SIZE, BLOCK_N)
    for first in range(start, end, BLOCK_N):
        live = first + offsets < end
        slots = _slots_of(pages, first, offsets, PAGE_SIZE, BLOCK_N)
        pages = _pages_of(table_row, first + BLOCK_N, offsets, end, PAGE_SIZE, BLOCK_N)
        acc, row_max, row_sum = _attend_tile(
            q_tile,
            acc,
            row_max,
            row_sum,
            k_cache + kv_head * k_stride_h,
            v_cache + kv_head * v_stride_h,
            k_stride_s,
            v_stride_s,
            slots,
            live,
            live[None, :],
            qk_scale,
            HEAD_DIM,
            BLOCK_D,
            True,
        )

    result = acc / row_sum[:, None]
    if chunk >= seq_len:  # the only split of this sequence: join has nothing to do
        out_ptrs = out + seq.to(tl.int64) * out_stride_t + heads[:, None] * out_stride_h
        tl.store(out_ptrs + dims[None, :], result.to(out.dtype.element_ty), mask=cells)
    else:
        total_heads = tl.num_programs(0) * GROUP
        cell = (seq * total_heads + heads) * num_splits + split
        tl.store(partial + cell[:, None] * HEAD_DIM + dims[None, :], result, mask=cells)
        tl.store(lse + cell, row_max + tl.log2(row_sum), mask=groups < GROUP)


@triton.jit(do_not_specialize=_SPLIT_ARGS, do_not_specialize_on_alignment=["seq_lens", "lse"])
def _join_kernel(
    partial: tl.tensor,
    lse: tl.tensor,
    seq_lens: tl.tensor,
    out: tl.tensor,
    out_stride_t: tl.tensor,
    out_stride_h: tl.tensor,
    num_splits: tl.tensor,
    min_chunk: tl.tensor,
    NUM_Q_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
) -> None:
    """Grid (query heads, bs): joins the live splits of one head of one sequence."""
    head = tl.program_id(0)
    seq = tl.program_id(1)
    seq_len = tl.load(seq_lens + seq)
    chunk = _chunk_of(seq_len, num_splits, min_chunk, BLOCK_N)
    if chunk >= seq_len:
        return
    splits = tl.arange(0, BLOCK_S)
    dims = tl.arange(0, BLOCK_D)
    live = splits < tl.cdiv(seq_len, chunk)
    cell = (seq * NUM_Q_HEADS + head) * num_splits + splits
    logs = tl.load(lse + cell, mask=live, other=float("-inf"))
    weights = tl.exp2(logs - tl.max(logs, 0))
    weights = weights / tl.sum(weights, 0)
    # Splits that were not run hold leftovers of another step: they are masked, not weighed.
    tiles = tl.load(
        partial + cell[:, None] * HEAD_DIM + dims[None, :],
        mask=live[:, None] & (dims[None, :] < HEAD_DIM),
        other=0.0,
    )
    joined = tl.sum(tiles * weights[:, None], 0)
    out_ptrs = out + seq.to(tl.int64) * out_stride_t + head * out_stride_h + dims
    tl.store(out_ptrs, joined.to(out.dtype.element_ty), mask=dims < HEAD_DIM)


@triton.jit(
    do_not_specialize=["num_real_tokens"],
    do_not_specialize_on_alignment=[*_METADATA_ARGS, "query_start_loc"],
)
def _extend_kernel(
    q: tl.tensor,
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    page_table: tl.tensor,
    req_rows: tl.tensor,
    seq_lens: tl.tensor,
    query_start_loc: tl.tensor,
    out: tl.tensor,
    q_stride_t: tl.tensor,
    q_stride_h: tl.tensor,
    k_stride_s: tl.tensor,
    k_stride_h: tl.tensor,
    v_stride_s: tl.tensor,
    v_stride_h: tl.tensor,
    out_stride_t: tl.tensor,
    out_stride_h: tl.tensor,
    table_stride: tl.tensor,
    num_real_tokens: tl.tensor,
    qk_scale: tl.tensor,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
) -> None:
    """Grid (KV heads, row blocks, bs). Row r of a sequence is query token r // GROUP, head
    r % GROUP. Long blocks, those at the end of a sequence, start first."""
    kv_head = tl.program_id(0)
    seq = tl.program_id(2)
    q_start = tl.load(query_start_loc + seq)
    q_end = tl.minimum(tl.load(query_start_loc + seq + 1), num_real_tokens)
    extend_len = q_end - q_start
    first_row = (tl.num_programs(1) - 1 - tl.program_id(1)) * BLOCK_M
    if first_row >= extend_len * GROUP:
        return
    seq_len = tl.load(seq_lens + seq)
    prefix_len = seq_len - (tl.load(query_start_loc + seq + 1) - q_start)
    table_row = page_table + tl.load(req_rows + seq) * table_stride

    rows = first_row + tl.arange(0, BLOCK_M)
    tokens = rows // GROUP
    heads = kv_head * GROUP + rows % GROUP
    dims = tl.arange(0, BLOCK_D)
    cells = (tokens[:, None] < extend_len) & (dims[None, :] < HEAD_DIM)
    token_rows = (q_start + tokens).to(tl.int64)
    q_ptrs = q + token_rows[:, None] * q_stride_t + heads[:, None] * q_stride_h + dims[None, :]
    q_tile = tl.load(q_ptrs, mask=cells, other=0.0)

    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    offsets = tl.arange(0, BLOCK_N)
    k_head = k_cache + kv_head * k_stride_h
    v_head = v_cache + kv_head * v_stride_h

    # Keys up to the block's first token are seen by every row: no mask is needed there.
    seen_by_all = (prefix_len + first_row // GROUP + 1) // BLOCK_N * BLOCK_N
    everything = offsets >= 0
    last_token = tl.minimum((first_row + BLOCK_M - 1) // GROUP, extend_len - 1)
    kv_end = prefix_len + last_token + 1
    pages = _pages_of(table_row, 0, offsets, kv_end, PAGE_SIZE, BLOCK_N)
    for first in range(0, seen_by_all, BLOCK_N):
        slots = _slots_of(pages, first, offsets, PAGE_SIZE, BLOCK_N)
        pages = _pages_of(table_row, first + BLOCK_N, offsets, kv_end, PAGE_SIZE, BLOCK_N)
        acc, row_max, row_sum = _attend_tile(
            q_tile,
            acc,
            row_max,
            row_sum,
            k_head,
            v_head,
            k_stride_s,
            v_stride_s,
            slots,
            everything,
            everything[None, :],
            qk_scale,
            HEAD_DIM,
            BLOCK_D,
            False,
        )
    for first in range(seen_by_all, kv_end, BLOCK_N):
        keys = first + offsets
        live = keys < kv_end
        slots = _slots_of(pages, first, offsets, PAGE_SIZE, BLOCK_N)
        pages = _pages_of(table_row, first + BLOCK_N, offsets, kv_end, PAGE_SIZE, BLOCK_N)
        visible = live[None, :] & (keys[None, :] <= (prefix_len + tokens)[:, None])
        acc, row_max, row_sum = _attend_tile(
            q_tile,
            acc,
            row_max,
            row_sum,
            k_head,
            v_head,
            k_stride_s,
            v_stride_s,
            slots,
            live,
            visible,
            qk_scale,
            HEAD_DIM,
            BLOCK_D,
            True,
        )

    result = acc / row_sum[:, None]
    out_ptrs = out + token_rows[:, None] * out_stride_t + heads[:, None] * out_stride_h
    tl.store(out_ptrs + dims[None, :], result.to(out.dtype.element_ty), mask=cells)
