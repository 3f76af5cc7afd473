"""Triton body of ``sampling.sample``: filters without a sort, noise without a noise tensor.

Three launches at most. ``_boundary_kernel`` finds, per row, the last token that top-k, top-p and
min-p keep: a four-way search over the ordered bits of the logits, first by count, then by
probability mass. ``_draw_kernel`` hashes the noise in registers and leaves the best token of each
block; ``_pick_kernel`` takes the best block. Nothing here waits for the device, and no sum
depends on other rows, so a row draws the same token alone, in a batch and in a graph.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from duograph.kernels.pdl import pdl_launch

GREEDY_EPSILON: tl.constexpr = tl.constexpr(1e-5)  # as in sampling.py, where it is explained
_LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
_LOWEST_KEY: tl.constexpr = tl.constexpr(-(2**31))  # below the key of -inf: keeps everything
_DRAW_BLOCK = 2048
_SEARCH_BLOCK = 8192


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
    blocks = triton.cdiv(vocab, _DRAW_BLOCK)
    best = torch.empty((n, blocks), dtype=torch.float32, device=logits.device)
    best_id = torch.empty((n, blocks), dtype=torch.int32, device=logits.device)
    _draw_kernel[(blocks, n)](
        logits,
        tokens if rows is None else rows,
        temperature,
        seed,
        position,
        boundary,
        best,
        best_id,
        logits.stride(0),
        n,
        VOCAB=vocab,
        BLOCK=_DRAW_BLOCK,
        FILTERED=filtered,
        INDEXED=rows is not None,
        num_warps=8,
        **pdl_launch(logits.device),
    )
    _pick_kernel[(n,)](
        best,
        best_id,
        tokens,
        tokens if rows is None else rows,
        tokens if next_tokens is None else next_tokens,
        STORE=next_tokens is not None,
        VOCAB=vocab,
        BLOCKS=blocks,
        BLOCK_B=triton.next_power_of_2(blocks),
        num_warps=1,
        **pdl_launch(logits.device),
    )
    return tokens


def boundaries(
    logits: torch.Tensor,
    *,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    rows: torch.Tensor | None = None,
) -> torch.Tensor:
    """What ``sampling.filter_logits`` would keep of logits / temperature.

    Returns:
        int32 [2, n]: a key and an id per row. A token stays if its ``_ordered_key`` is larger,
        or equal and its id not larger. Greedy rows keep everything.
    """
    n, vocab = logits.shape
    result = torch.empty((2, n), dtype=torch.int32, device=logits.device)
    _boundary_kernel[(n,)](
        logits,
        result if rows is None else rows,
        temperature,
        top_k,
        top_p,
        min_p,
        result,
        logits.stride(0),
        n,
        VOCAB=vocab,
        BLOCK=_SEARCH_BLOCK,
        INDEXED=rows is not None,
        num_warps=32,
    )
    return result


@triton.jit
def _ordered_key(logits: tl.tensor) -> tl.tensor:
    """int32 that orders like the float32 it is made from; -0 and 0 are one."""
    bits = (logits + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)


@triton.jit
def _value_of_key(key: tl.tensor) -> tl.tensor:
    """Inverse of ``_ordered_key`` for a scalar."""
    return tl.where(key >= 0, key, key ^ 0x7FFFFFFF).to(tl.float32, bitcast=True)


@triton.jit
def _row_maximum(row: tl.tensor, VOCAB: tl.constexpr, BLOCK: tl.constexpr) -> tl.tensor:
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    for first in tl.range(0, VOCAB, BLOCK, num_stages=3):
        ids = first + tl.arange(0, BLOCK)
        logits = tl.load(row + ids, mask=ids < VOCAB, other=float("-inf"))
        best = tl.maximum(best, logits.to(tl.float32))
    return tl.max(best, 0)


@triton.jit
def _sums_from(
    row: tl.tensor,
    low: tl.tensor,  # int32 keys
    middle: tl.tensor,
    high: tl.tensor,
    maximum: tl.tensor,
    sharpness: tl.tensor,  # log2(e) / temperature
    MASS: tl.constexpr,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """float32 sums over the tokens at or above each of three keys: of the weights relative to
    the most likely token if MASS, else their count, which float32 holds exactly."""
    from_low = tl.zeros([BLOCK], tl.float32)
    from_middle = tl.zeros([BLOCK], tl.float32)
    from_high = tl.zeros([BLOCK], tl.float32)
    for first in tl.range(0, VOCAB, BLOCK, num_stages=3):
        ids = first + tl.arange(0, BLOCK)
        logits = tl.load(row + ids, mask=ids < VOCAB, other=float("-inf")).to(tl.float32)
        if MASS:
            weights = tl.exp2((logits - maximum) * sharpness)
        else:
            weights = tl.where(ids < VOCAB, 1.0, 0.0)
        keys = _ordered_key(logits)
        from_low += tl.where(keys >= low, weights, 0.0)
        from_middle += tl.where(keys >= middle, weights, 0.0)
        from_high += tl.where(keys >= high, weights, 0.0)
    return tl.sum(from_low, 0), tl.sum(from_middle, 0), tl.sum(from_high, 0)


@triton.jit
def _largest_reaching(
    row: tl.tensor,
    target: tl.tensor,
    lowest: tl.tensor,  # int32 key from which on the sum reaches the target
    maximum: tl.tensor,
    sharpness: tl.tensor,
    MASS: tl.constexpr,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """The largest key whose tokens at or above sum to ``target`` or more, and the sum above it.

    Rounded sums of fewer non-negative terms in the same order are never larger, so the search
    is sound in floating point. Three pivots a pass: 16 passes for 32 bits.
    """
    low = lowest.to(tl.int64)  # reaches
    high = _ordered_key(maximum).to(tl.int64) + 1  # does not reach: nothing lies there
    above = 0.0
    while high - low > 1:
        step = (high - low + 3) // 4
        one = low + step
        two = one + step
        three = two + step
        sum_one, sum_two, sum_three = _sums_from(
            row,
            one.to(tl.int32),
            two.to(tl.int32),
            three.to(tl.int32),
            maximum,
            sharpness,
            MASS,
            VOCAB,
            BLOCK,
        )
        if sum_three >= target:
            low = three
        elif sum_two >= target:
            low = two
            high = three
            above = sum_three
        elif sum_one >= target:
            low = one
            high = two
            above = sum_two
        else:
            high = one
            above = sum_one
    return low.to(tl.int32), above


@triton.jit
def _last_kept_id(
    row: tl.tensor,
    key: tl.tensor,
    room: tl.tensor,  # int32, how many tokens with this key stay
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """The largest id that stays among equal logits, of which the lowest ids stay."""
    seen = 0
    last = VOCAB
    for first in tl.range(0, VOCAB, BLOCK, num_stages=3):
        ids = first + tl.arange(0, BLOCK)
        logits = tl.load(row + ids, mask=ids < VOCAB, other=float("nan")).to(tl.float32)
        equal = (_ordered_key(logits) == key).to(tl.int32)
        here = tl.sum(equal, 0)
        if (seen < room) & (seen + here >= room):
            rank = seen + tl.cumsum(equal, 0)
            last = tl.max(tl.where((equal > 0) & (rank <= room), ids, -1), 0)
        seen += here
    return last


@triton.jit
def _table_row(rows: tl.tensor, index: tl.tensor, INDEXED: tl.constexpr) -> tl.tensor:
    """Where the parameters of logits row ``index`` are."""
    place = index.to(tl.int64)
    if INDEXED:
        place = tl.load(rows + index)
    return place


# Only pointers to metadata: views of one buffer differ in alignment, and a second compiled
# variant would stall a request.
_METADATA_ARGS = ["rows", "temperature", "top_k", "top_p", "min_p", "seed", "position"]


@triton.jit(do_not_specialize=["n"], do_not_specialize_on_alignment=_METADATA_ARGS)
def _boundary_kernel(
    logits: tl.tensor,
    rows: tl.tensor,
    temperature: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    min_p: tl.tensor,
    boundary: tl.tensor,  # int32 [2, n]: key of the last kept token, largest id with that key
    stride: tl.tensor,
    n: tl.tensor,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    INDEXED: tl.constexpr,
) -> None:
    """Grid (n,)."""
    index = tl.program_id(0)
    row = logits + index.to(tl.int64) * stride
    place = _table_row(rows, index, INDEXED)
    heat = tl.load(temperature + place)
    k = tl.load(top_k + place).to(tl.int32)
    p = tl.load(top_p + place)
    floor = tl.load(min_p + place)
    key = _LOWEST_KEY
    last = VOCAB
    by_count = (k > 0) & (k < VOCAB)
    if (heat >= GREEDY_EPSILON) & (by_count | (p < 1.0) | (floor > 0.0)):
        maximum = _row_maximum(row, VOCAB, BLOCK)
        sharpness = _LOG2_E / heat
        room = VOCAB
        if by_count:
            key, above = _largest_reaching(
                row, k.to(tl.float32), key, maximum, sharpness, False, VOCAB, BLOCK
            )
            room = k - above.to(tl.int32)
        if p < 1.0:
            total, _, beyond = _sums_from(
                row, key, key, key + 1, maximum, sharpness, True, VOCAB, BLOCK
            )
            if by_count:
                edge = tl.exp2((_value_of_key(key) - maximum) * sharpness)
                total = beyond + room.to(tl.float32) * edge
            target = p * total
            # A target of zero, from a tiny p, must still leave the most likely token.
            target = tl.maximum(target, 1e-30)
            count_key = key
            key, above = _largest_reaching(row, target, key, maximum, sharpness, True, VOCAB, BLOCK)
            edge = tl.exp2((_value_of_key(key) - maximum) * sharpness)
            fitting = tl.ceil((target - above) / tl.maximum(edge, 1e-37))
            fitting = tl.minimum(tl.maximum(fitting, 1.0), VOCAB).to(tl.int32)
            room = tl.where(key == count_key, tl.minimum(room, fitting), fitting)
        if by_count | (p < 1.0):
            last = _last_kept_id(row, key, room, VOCAB, BLOCK)
        if floor > 0.0:
            least = maximum + tl.log(floor) * heat
            least_key = tl.minimum(_ordered_key(least), _ordered_key(maximum))
            last = tl.where(least_key > key, VOCAB, last)
            key = tl.maximum(key, least_key)
    tl.store(boundary + index, key)
    tl.store(boundary + n + index, last)


@triton.jit
def _mix_64(x: tl.tensor) -> tl.tensor:
    """splitmix64's finaliser on a uint64 scalar."""
    x = x + 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _gumbel(seed: tl.tensor, position: tl.tensor, ids: tl.tensor) -> tl.tensor:
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
    exponential = tl.where(uniform < 0.03125, series, -tl.log(1.0 - uniform))
    return -tl.log(exponential)


@triton.jit(
    do_not_specialize=["n"],
    do_not_specialize_on_alignment=["rows", "temperature", "seed", "position"],
)
def _draw_kernel(
    logits: tl.tensor,
    rows: tl.tensor,
    temperature: tl.tensor,
    seed: tl.tensor,
    position: tl.tensor,
    boundary: tl.tensor,
    best: tl.tensor,  # float32 [n, blocks]
    best_id: tl.tensor,  # int32 [n, blocks]
    stride: tl.tensor,
    n: tl.tensor,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    FILTERED: tl.constexpr,
    INDEXED: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Grid (blocks, n)."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    block = tl.program_id(0)
    index = tl.program_id(1)
    ids = block * BLOCK + tl.arange(0, BLOCK)
    row = logits + index.to(tl.int64) * stride
    scores = tl.load(row + ids, mask=ids < VOCAB, other=float("-inf")).to(tl.float32)
    place = _table_row(rows, index, INDEXED)
    heat = tl.load(temperature + place)
    if heat >= GREEDY_EPSILON:
        noise = _gumbel(tl.load(seed + place), tl.load(position + index).to(tl.int64), ids)
        drawn = scores * (1.0 / heat) + noise
        if FILTERED:
            keys = _ordered_key(scores)
            edge = tl.load(boundary + index)
            last = tl.load(boundary + n + index)
            kept = (keys > edge) | ((keys == edge) & (ids <= last))
            drawn = tl.where(kept, drawn, float("-inf"))
        scores = drawn
    value, winner = tl.max(scores, 0, return_indices=True)
    cell = index.to(tl.int64) * tl.num_programs(0) + block
    tl.store(best + cell, value)
    tl.store(best_id + cell, block * BLOCK + winner)


@triton.jit(do_not_specialize_on_alignment=["rows"])
def _pick_kernel(
    best: tl.tensor,
    best_id: tl.tensor,
    tokens: tl.tensor,
    rows: tl.tensor,
    next_tokens: tl.tensor,
    STORE: tl.constexpr,
    VOCAB: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK_B: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Grid (n,). Of equal scores the lowest id wins, as in torch.argmax."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    index = tl.program_id(0).to(tl.int64)
    blocks = tl.arange(0, BLOCK_B)
    scores = tl.load(best + index * BLOCKS + blocks, mask=blocks < BLOCKS, other=float("-inf"))
    _, winner = tl.max(scores, 0, return_indices=True)
    token = tl.load(best_id + index * BLOCKS + tl.minimum(winner, BLOCKS - 1))
    # A row of NaN, such as a padding row's, must still give an id that can be embedded.
    token = tl.minimum(token, VOCAB - 1).to(tl.int64)
    tl.store(tokens + index, token)
    if STORE:
        row = tl.load(rows + index)
        tl.store(next_tokens + row, tl.where(row == 0, 0, token))
