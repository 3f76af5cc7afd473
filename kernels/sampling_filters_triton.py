"""Which tokens top-k, top-p and min-p keep, found without a sort.

``_boundary_kernel`` finds, per row, the last token that stays: a four-way search over the ordered
bits of the logits, first by count, then by probability mass. No sum depends on other rows, so a
row keeps the same tokens alone and in a batch. This file draws nothing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

GREEDY_EPSILON: tl.constexpr = tl.constexpr(1e-5)  # as in sampling.py, where it is explained
_LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
_LOWEST_KEY: tl.constexpr = tl.constexpr(-(2**31))  # below the key of -inf: keeps everything
_SEARCH_BLOCK = 8192


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
        int32 [2, n]: a key and an id per row. A token stays if its ``ordered_key`` is larger,
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
def ordered_key(logits: tl.tensor) -> tl.tensor:
    """int32 that orders like the float32 it is made from; -0 and 0 are one."""
    bits = (logits + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)


@triton.jit
def _value_of_key(key: tl.tensor) -> tl.tensor:
    """Inverse of ``ordered_key`` for a scalar."""
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
        keys = ordered_key(logits)
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
    high = ordered_key(maximum).to(tl.int64) + 1  # does not reach: nothing lies there
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
        equal = (ordered_key(logits) == key).to(tl.int32)
        here = tl.sum(equal, 0)
        if (seen < room) & (seen + here >= room):
            rank = seen + tl.cumsum(equal, 0)
            last = tl.max(tl.where((equal > 0) & (rank <= room), ids, -1), 0)
        seen += here
    return last


@triton.jit
def table_row(rows: tl.tensor, index: tl.tensor, INDEXED: tl.constexpr) -> tl.tensor:
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
    place = table_row(rows, index, INDEXED)
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
            least_key = tl.minimum(ordered_key(least), ordered_key(maximum))
            last = tl.where(least_key > key, VOCAB, last)
            key = tl.maximum(key, least_key)
    tl.store(boundary + index, key)
    tl.store(boundary + n + index, last)
