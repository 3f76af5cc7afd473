"""Triton body of ``sampling.sample``: noise without a noise tensor.

Three launches at most: the one of ``sampling_filters_triton``; ``_draw_kernel``, which hashes the
noise in registers and leaves the best token of each span of a row; and ``_pick_kernel``, which
takes the best span. Nothing here waits for the device or depends on other rows, so a row draws
the same token alone, in a batch and in a graph.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait, libdevice

from duograph.kernels.launch import ALIGNMENT, Grid, Launcher, Variant
from duograph.kernels.pdl import has_pdl, pdl_options
from duograph.kernels.sampling_filters_triton import (
    GREEDY_EPSILON,
    boundaries,
    ordered_key,
    table_row,
)

_DRAW_BLOCK = 2048
_DRAW_PROGRAMS = 2048  # more of them hide no more: each then walks along its row instead


def sample(
    logits: torch.Tensor,
    *,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seed: torch.Tensor,
    position: torch.Tensor,
    filtered: bool,
    rows: torch.Tensor | None = None,
    next_tokens: torch.Tensor | None = None,
) -> torch.Tensor:
    """See ``sampling.sample``; the same random bits, so the same tokens up to the rounding of
    the division and the two logarithms. Logits so close that they become equal when divided by
    the temperature are still told apart by the filters here.

    Raises:
        ValueError: rows of ``logits`` [n, vocab] are not dense.
    """
    shape, strides = logits.shape, logits.stride()
    if strides[1] != 1:
        raise ValueError("sample needs logits with a dense last dimension")
    if not shape[0]:
        return torch.empty(0, dtype=torch.int64, device=logits.device)
    boundary = (
        boundaries(
            logits, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, rows=rows
        )
        if filtered
        else None
    )
    tables = _Tables(temperature, seed, position, boundary, rows, next_tokens)
    types = (shape, strides, logits.dtype, logits.get_device(), *tables.types())
    plan = _plans.get(types)
    if plan is None:
        plan = _plans[types] = _make_plan(logits, tables)
    drawn = _sample_directly(plan, logits, tables)
    return _sample_by_launchers(plan, logits, tables) if drawn is None else drawn


@dataclass(slots=True)  # a frozen one takes three times as long to make
class _Tables:
    """What is read besides the logits, and ``next_tokens``. Of ``boundary``, ``rows`` and
    ``next_tokens`` those that are missing are never touched: the kernels get any tensor."""

    temperature: torch.Tensor
    seed: torch.Tensor
    position: torch.Tensor
    boundary: torch.Tensor | None
    rows: torch.Tensor | None
    next_tokens: torch.Tensor | None

    def types(self) -> tuple[Hashable, ...]:
        """What a launch can depend on: dtype and index of the device of each."""
        rows, store = self.rows, self.next_tokens
        return (
            self.temperature.dtype,
            self.temperature.get_device(),
            self.seed.dtype,
            self.seed.get_device(),
            self.position.dtype,
            self.position.get_device(),
            self.boundary is not None,
            None if rows is None else (rows.dtype, rows.get_device()),
            None if store is None else (store.dtype, store.get_device()),
        )


@dataclass(slots=True)
class _Launch:
    """Of one kernel: what stays the same from call to call.

    Attributes:
        scalars: arguments behind the tensors.
        variant: what may be launched directly, once it is known.
    """

    grid: Grid
    scalars: tuple[Any, ...]
    key: Hashable
    options: dict[str, Any]
    variant: Variant | None = None


@dataclass(frozen=True, slots=True)
class _Plan:
    """Both launches for logits of one layout and tables of some types.

    Attributes:
        cells: spans of all rows, and a few to align what follows them.
        same_device: whether all tensors are on the device of the logits.
    """

    device: torch.device
    n: int
    cells: int
    draw: _Launch
    pick: _Launch
    same_device: bool


_plans: dict[Hashable, _Plan] = {}


def _make_plan(logits: torch.Tensor, tables: _Tables) -> _Plan:
    n, vocab = logits.shape
    rows, store = tables.rows, tables.next_tokens
    inputs = [tables.temperature, tables.seed, tables.position]
    given = [tensor for tensor in (rows, store) if tensor is not None]
    blocks_each, spans, block_s = _spans(n, vocab)
    pdl, stride = has_pdl(logits.device), logits.stride(0)
    filtered, indexed, stored = tables.boundary is not None, rows is not None, store is not None
    # FAST: the interpreter has no such instruction
    draw = (vocab, _DRAW_BLOCK, filtered, indexed, logits.is_cuda, pdl)
    pick = (stored, vocab, block_s, pdl)
    dtypes = tuple([tensor.dtype for tensor in (logits, *inputs)])
    table, target = (torch.int64 if tensor is None else tensor.dtype for tensor in (rows, store))
    return _Plan(
        device=logits.device,
        n=n,
        cells=-(-n * spans // 4) * 4,
        draw=_Launch(
            grid=(spans, n, 1),
            scalars=(stride, n, blocks_each, *draw),
            key=(dtypes, table, stride, draw),
            options={"num_warps": 8, **pdl_options(pdl)},
        ),
        pick=_Launch(
            grid=(n, 1, 1),
            scalars=(spans, *pick),
            key=(table, target, pick),
            options={"num_warps": 1, **pdl_options(pdl)},
        ),
        same_device=all(tensor.device == logits.device for tensor in (*inputs, *given)),
    )


def _sample_directly(plan: _Plan, logits: torch.Tensor, tables: _Tables) -> torch.Tensor | None:
    """None if that cannot be: nothing compiled yet, a misaligned tensor, another device."""
    draw, pick = plan.draw, plan.pick
    if draw.variant is None or pick.variant is None:
        return None
    tokens = torch.empty(plan.n, dtype=torch.int64, device=plan.device)
    # Its halves are the best scores and their ids. Freed before they are used, as the host sees
    # it: the memory is given away again in the order of the stream.
    scratch = tokens.new_empty(plan.cells)
    boundary, rows, next_tokens = tables.boundary, tables.rows, tables.next_tokens
    logits_at, tokens_at, best_at = logits.data_ptr(), tokens.data_ptr(), scratch.data_ptr()
    best_id_at = best_at + 4 * plan.cells
    boundary_at = tokens_at if boundary is None else boundary.data_ptr()
    rows_at = tokens_at if rows is None else rows.data_ptr()
    store_at = tokens_at if next_tokens is None else next_tokens.data_ptr()
    if (logits_at | tokens_at | best_at | best_id_at | boundary_at | store_at) % ALIGNMENT:
        return None
    options = (tables.temperature.data_ptr(), tables.seed.data_ptr(), tables.position.data_ptr())
    drawn = (logits_at, rows_at, *options, boundary_at, best_at, best_id_at, *draw.scalars)
    picked = (best_at, best_id_at, tokens_at, rows_at, store_at, *pick.scalars)
    if draw.variant.launch(draw.grid, drawn) and pick.variant.launch(pick.grid, picked):
        return tokens
    return None


def _sample_by_launchers(plan: _Plan, logits: torch.Tensor, tables: _Tables) -> torch.Tensor:
    """Leaves the variants in the plan, for the next time."""
    draw, pick, cells = plan.draw, plan.pick, plan.cells
    tokens = torch.empty(plan.n, dtype=torch.int64, device=logits.device)
    scores, best_id = tokens.new_empty(cells).view(torch.int32).view(2, cells).unbind()
    best, options = scores.view(torch.float32), (tables.temperature, tables.seed, tables.position)
    boundary = tokens if tables.boundary is None else tables.boundary
    rows = tokens if tables.rows is None else tables.rows
    store = tokens if tables.next_tokens is None else tables.next_tokens
    _launch_draw(
        draw.grid,
        (logits, rows, *options, boundary, best, best_id, *draw.scalars),
        key=draw.key,
        aligned=(logits, boundary, best, best_id),
        **draw.options,
    )
    _launch_pick(
        pick.grid,
        (best, best_id, tokens, rows, store, *pick.scalars),
        key=pick.key,
        aligned=(best, best_id, tokens, store),
        **pick.options,
    )
    if plan.same_device:
        draw.variant = _on_device_of(logits, _launch_draw.kept(draw.key))
        pick.variant = _on_device_of(logits, _launch_pick.kept(pick.key))
    return tokens


def _on_device_of(tensor: torch.Tensor, variant: Variant | None) -> Variant | None:
    return None if variant is None or variant.device != tensor.get_device() else variant


@cache
def _spans(n: int, vocab: int) -> tuple[int, int, int]:
    """Blocks of one span, spans of a row, and the power of two that holds any number of them."""
    blocks = -(-vocab // _DRAW_BLOCK)
    blocks_each = -(-n * blocks // _DRAW_PROGRAMS)
    return blocks_each, -(-blocks // blocks_each), triton.next_power_of_2(blocks)


@triton.jit
def _mix_64(x: tl.tensor) -> tl.tensor:
    """splitmix64's finaliser on a uint64 scalar."""
    x = x + 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _log(x: tl.tensor, FAST: tl.constexpr) -> tl.tensor:
    """Natural logarithm; FAST, by the card's instruction, which errs by 2**-22 near 1."""
    if FAST:
        result = libdevice.fast_logf(x)
    else:
        result = tl.log(x)
    return result


@triton.jit
def _gumbel(seed: tl.tensor, position: tl.tensor, ids: tl.tensor, FAST: tl.constexpr) -> tl.tensor:
    """float32 noise of the tokens ``ids``: ``sampling.random_bits`` and ``gumbel_noise``."""
    counter = position.to(tl.uint64, bitcast=True) * 0x9E3779B97F4A7C15
    stream = _mix_64(_mix_64(seed.to(tl.uint64, bitcast=True)) + counter)
    low = (stream & 0xFFFFFFFF).to(tl.uint32)
    high = (stream >> 32).to(tl.uint32)
    bits = ids.to(tl.uint32) * 0x9E3779B9 + low
    bits = (bits ^ (bits >> 16)) * 0x21F0AAAD
    bits = bits ^ high
    bits = (bits ^ (bits >> 15)) * 0x735A2D97
    bits = bits ^ (bits >> 15)
    uniform = bits.to(tl.int32, bitcast=True).to(tl.float32) + 2147483648.0
    uniform = uniform * 2.3283064365386963e-10  # 2^-32
    uniform = tl.minimum(tl.maximum(uniform, 1.1641532182693481e-10), 0.99999994039535522)
    # -log1p(-u). There is no builtin, and log(1 - u) loses the small u, which are the winners'
    # noise: those take the first five terms of the series, exact to a rounding below 1/32.
    series = 0.25 + uniform * 0.2
    series = 0.33333333333333333 + uniform * series
    series = uniform + uniform * uniform * (0.5 + uniform * series)
    exponential = tl.where(uniform < 0.03125, series, -_log(1.0 - uniform, FAST))
    return -_log(exponential, FAST)


@triton.jit
def _best_of(
    scores: tl.tensor,
    ids: tl.tensor,
    best: tl.tensor,
    best_id: tl.tensor,
) -> tl.tensor:
    """Lane by lane; of equal scores the earlier one stays."""
    better = scores > best
    return tl.where(better, scores, best), tl.where(better, ids, best_id)


@triton.jit(
    do_not_specialize=["n", "blocks_each"],
    do_not_specialize_on_alignment=["rows", "temperature", "seed", "position"],
)
def _draw_kernel(
    logits: tl.tensor,
    rows: tl.tensor,
    temperature: tl.tensor,
    seed: tl.tensor,
    position: tl.tensor,
    boundary: tl.tensor,
    best: tl.tensor,  # float32 [n, spans]
    best_id: tl.tensor,  # int32 [n, spans]
    stride: tl.tensor,
    n: tl.tensor,
    blocks_each: tl.tensor,  # of BLOCK ids: the span of one program
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    FILTERED: tl.constexpr,
    INDEXED: tl.constexpr,
    FAST: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Grid (spans, n)."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    index = tl.program_id(1)
    row = logits + index.to(tl.int64) * stride
    begin = tl.program_id(0) * blocks_each * BLOCK  # the compiler must see its alignment
    end = tl.minimum(begin + blocks_each * BLOCK, VOCAB)
    place = table_row(rows, index, INDEXED)
    heat = tl.load(temperature + place)
    lanes = tl.arange(0, BLOCK)
    top = tl.full([BLOCK], float("-inf"), tl.float32)
    top_id = begin + lanes
    if heat >= GREEDY_EPSILON:
        row_seed, row_position = tl.load(seed + place), tl.load(position + index).to(tl.int64)
        for first in tl.range(begin, end, BLOCK, num_stages=4):
            ids = first + lanes
            scores = tl.load(row + ids, mask=ids < VOCAB, other=float("-inf")).to(tl.float32)
            drawn = scores * (1.0 / heat) + _gumbel(row_seed, row_position, ids, FAST)
            if FILTERED:
                keys = ordered_key(scores)
                edge = tl.load(boundary + index)
                last = tl.load(boundary + n + index)
                kept = (keys > edge) | ((keys == edge) & (ids <= last))
                drawn = tl.where(kept, drawn, float("-inf"))
            top, top_id = _best_of(drawn, ids, top, top_id)
    else:
        for first in tl.range(begin, end, BLOCK, num_stages=4):
            ids = first + lanes
            scores = tl.load(row + ids, mask=ids < VOCAB, other=float("-inf")).to(tl.float32)
            top, top_id = _best_of(scores, ids, top, top_id)
    value = tl.max(top, 0)
    cell = index.to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    tl.store(best + cell, value)
    tl.store(best_id + cell, tl.min(tl.where(top == value, top_id, VOCAB), 0))


@triton.jit(do_not_specialize=["spans"], do_not_specialize_on_alignment=["rows"])
def _pick_kernel(
    best: tl.tensor,
    best_id: tl.tensor,
    tokens: tl.tensor,
    rows: tl.tensor,
    next_tokens: tl.tensor,
    spans: tl.tensor,
    STORE: tl.constexpr,
    VOCAB: tl.constexpr,
    BLOCK_S: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Grid (n,). Of equal scores the lowest id wins, as in torch.argmax."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    index = tl.program_id(0).to(tl.int64)
    cells = tl.arange(0, BLOCK_S)
    scores = tl.load(best + index * spans + cells, mask=cells < spans, other=float("-inf"))
    _, winner = tl.max(scores, 0, return_indices=True)
    token = tl.load(best_id + index * spans + tl.minimum(winner, spans - 1))
    # A row of NaN, such as a padding row's, must still give an id that can be embedded.
    token = tl.minimum(token, VOCAB - 1).to(tl.int64)
    tl.store(tokens + index, token)
    if STORE:
        row = tl.load(rows + index)
        tl.store(next_tokens + row, tl.where(row == 0, 0, token))


_launch_draw = Launcher(_draw_kernel)
_launch_pick = Launcher(_pick_kernel)
