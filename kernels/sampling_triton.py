"""Triton body of ``sampling.sample``: noise without a noise tensor.

Three launches at most: the one of ``sampling_filters_triton``; ``_draw_kernel``, which hashes the
noise in registers and leaves the best token of each span of a row; and ``_pick_kernel``, which
takes the best span. Nothing here waits for the device or depends on other rows, so a row draws
the same token alone, in a batch and in a graph.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait, libdevice

from duograph.kernels.launch import Launcher
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
    n, vocab = logits.shape
    if logits.stride(1) != 1:
        raise ValueError("sample needs logits with a dense last dimension")
    tokens = torch.empty(n, dtype=torch.int64, device=logits.device)
    if not n:
        return tokens
    boundary = (
        boundaries(
            logits, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, rows=rows
        )
        if filtered
        else tokens  # not read
    )
    blocks_each, spans, block_s = _spans(n, vocab)
    best = torch.empty((n, spans), dtype=torch.float32, device=logits.device)
    best_id = torch.empty((n, spans), dtype=torch.int32, device=logits.device)
    table = tokens if rows is None else rows  # not read without
    pdl = has_pdl(logits.device)
    # FAST: the interpreter has no such instruction
    draw = (vocab, _DRAW_BLOCK, filtered, rows is not None, logits.is_cuda, pdl)
    options = (temperature, seed, position)
    stride = logits.stride(0)
    dtypes = (logits.dtype, table.dtype, *[option.dtype for option in options])
    _launch_draw(
        (spans, n, 1),
        (logits, table, *options, boundary, best, best_id, stride, n, blocks_each, *draw),
        key=(dtypes, boundary.dtype, stride, draw),
        aligned=(logits, boundary, best, best_id),
        num_warps=8,
        **pdl_options(pdl),
    )
    store = tokens if next_tokens is None else next_tokens  # not written without
    pick = (next_tokens is not None, vocab, block_s, pdl)
    _launch_pick(
        (n, 1, 1),
        (best, best_id, tokens, table, store, spans, *pick),
        key=(table.dtype, store.dtype, pick),
        aligned=(best, best_id, tokens, store),
        num_warps=1,
        **pdl_options(pdl),
    )
    return tokens


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
