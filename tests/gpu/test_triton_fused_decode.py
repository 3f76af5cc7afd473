"""Rotation, KV write and attention of a decode step in one launch, against the separate ones."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import pytest
import torch

from duograph.kernels import fused
from duograph.kernels.attention.base import AttentionBackend
from duograph.kernels.attention.fused_decode import FusedDecode, Rotary
from duograph.kernels.attention.registry import create_backend
from duograph.tests.attention_cases import Problem, make_problem, tolerance

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

Heads = tuple[int, int, int]
# Groups of 1 to 8, and a dimension that is no power of two.
HEADS: list[Heads] = [(8, 8, 64), (32, 8, 64), (16, 8, 128), (32, 8, 128), (8, 1, 128), (6, 2, 80)]
EPS = 1e-6


@dataclass(slots=True)
class Step:
    """One decode step whose new keys and values are still in the projection."""

    problem: Problem
    k: torch.Tensor
    v: torch.Tensor
    rotary: Rotary

    def fused(self, backend: FusedDecode, out: torch.Tensor) -> torch.Tensor:
        p = self.problem
        cache = (p.k_cache, p.v_cache)
        backend.decode_fused(p.q, self.k, self.v, self.rotary, *cache, p.meta, out, p.scale)
        return out

    def separate(self, heads: Heads) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(out, k_cache, v_cache) of rope_and_cache and then decode, over copies."""
        p, turn = self.problem, self.rotary
        q, k = p.q.clone(), self.k.clone()
        cache = p.k_cache.clone(), p.v_cache.clone()
        loc = p.meta.out_cache_loc
        fused.rope_and_cache(
            q,
            k,
            self.v,
            turn.positions,
            turn.cos_sin,
            *cache,
            loc,
            q_norm=turn.q_norm,
            k_norm=turn.k_norm,
            eps=turn.eps,
        )
        out = torch.empty_like(q)
        attention_for(heads).decode(q, *cache, p.meta, out, p.scale)
        return out, *cache


def attention_for(heads: Heads) -> AttentionBackend:
    q_heads, kv_heads, dim = heads
    device = torch.device("cuda")
    return create_backend(
        "triton", num_q_heads=q_heads, num_kv_heads=kv_heads, head_dim=dim, device=device
    )


def backend_for(heads: Heads) -> FusedDecode:
    backend = attention_for(heads)
    assert isinstance(backend, FusedDecode)
    return backend


def make_step(
    heads: Heads,
    seq_lens: list[int],
    *,
    dtype: torch.dtype = torch.bfloat16,
    page_size: int = 64,
    max_pages: int = 80,
    norm: bool = False,
    seed: int = 0,
) -> Step:
    """The slot of the last position, as every slot of no sequence, holds NaN."""
    q_heads, kv_heads, dim = heads
    problem = make_problem(
        seq_lens=seq_lens,
        num_q_heads=q_heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        page_size=page_size,
        dtype=dtype,
        device="cuda",
        max_pages=max_pages,
        seed=seed,
    )
    meta, q = problem.meta, problem.q
    positions = meta.seq_lens.long() - 1
    pages = meta.page_table[meta.req_pool_indices, positions // page_size].long()
    meta.out_cache_loc = pages * page_size + positions % page_size
    problem.k_cache[meta.out_cache_loc] = problem.v_cache[meta.out_cache_loc] = float("nan")
    shape = (len(seq_lens), kv_heads, dim)
    k, v = (  # behind the query heads, as a merged projection leaves them
        q.as_strided(shape, q.stride(), q.storage_offset() + start * dim)
        for start in (q_heads, q_heads + kv_heads)
    )
    gen = torch.Generator().manual_seed(seed)
    angles = torch.rand(6000, dim // 2, generator=gen) * 6.3
    cos_sin = torch.cat((angles.cos(), angles.sin()), 1).cuda()
    q_norm, k_norm = torch.rand(2, dim, generator=gen).to("cuda", dtype) if norm else (None, None)
    return Step(problem, k, v, Rotary(positions, cos_sin, q_norm, k_norm, EPS))


def assert_same(step: Step, heads: Heads, out: torch.Tensor) -> None:
    limit = tolerance(out.dtype)
    wanted, k_cache, v_cache = step.separate(heads)
    torch.testing.assert_close(out, wanted, atol=limit, rtol=limit)
    assert torch.equal(step.problem.v_cache.nan_to_num(9.0), v_cache.nan_to_num(9.0))
    torch.testing.assert_close(
        step.problem.k_cache, k_cache, atol=limit, rtol=limit, equal_nan=True
    )
    # Nothing but the new slots has changed: everything else is the copy that separate() made.
    others = torch.ones(len(k_cache), dtype=torch.bool, device="cuda")
    others[step.problem.meta.out_cache_loc] = False
    mine, theirs = step.problem.k_cache[others], k_cache[others]
    assert torch.equal(mine.nan_to_num(9.0), theirs.nan_to_num(9.0))


BOUNDARIES = [1, 2, 63, 64, 65, 66, 127, 128, 129, 130, 191, 192, 193, 255, 256, 257, 258, 1000]


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_equals_the_separate_launches(heads: Heads, norm: bool, dtype: torch.dtype) -> None:
    backend = backend_for(heads)
    for lens in ([4097], BOUNDARIES[:3], BOUNDARIES[3:9], BOUNDARIES, BOUNDARIES * 8):
        step = make_step(heads, lens, norm=norm, dtype=dtype)
        assert_same(step, heads, step.fused(backend, torch.full_like(step.problem.q, 7.0)))


@pytest.mark.parametrize("page_size", [1, 16, 100])
def test_other_pages_and_half_precision(page_size: int) -> None:
    heads = (32, 8, 128)
    step = make_step(
        heads, BOUNDARIES, dtype=torch.float16, page_size=page_size, max_pages=5000 // page_size
    )
    out = step.fused(backend_for(heads), torch.full_like(step.problem.q, 7.0))
    assert_same(step, heads, out)


def test_query_and_key_stay_as_the_projection_left_them() -> None:
    heads = (16, 8, 128)
    step = make_step(heads, [70, 300], norm=True)
    before = [t.clone() for t in (step.problem.q, step.k, step.v)]
    step.fused(backend_for(heads), torch.empty_like(step.problem.q))
    for mine, kept in zip((step.problem.q, step.k, step.v), before, strict=True):
        assert torch.equal(mine, kept)


@pytest.mark.parametrize("heads", [(32, 8, 64), (16, 8, 128)])
def test_the_same_bits_at_every_call(heads: Heads) -> None:
    """Programs of a sequence arrive in another order each time; the result may not show it."""
    step = make_step(heads, [4999, 1300, 129, 64, 1])
    backend = backend_for(heads)
    first = step.fused(backend, torch.empty_like(step.problem.q)).clone()
    for _ in range(200):
        assert torch.equal(step.fused(backend, torch.empty_like(first)), first)


@pytest.mark.parametrize("bs", [2, 8, 40])
def test_a_row_gives_the_same_bits_alone_and_in_a_crowd(bs: int) -> None:
    """At one batch size: the others are padding rows once, and long sequences once."""
    heads = (32, 8, 64)
    rng = random.Random(bs)
    crowd = make_step(heads, [777, *(rng.randint(1, 3000) for _ in range(bs - 1))])
    backend = backend_for(heads)
    together = crowd.fused(backend, torch.empty_like(crowd.problem.q))[0].clone()
    meta = crowd.problem.meta
    alone = replace(crowd, rotary=replace(crowd.rotary, positions=crowd.rotary.positions.clone()))
    meta.seq_lens[1:], alone.rotary.positions[1:] = 1, 0
    meta.req_pool_indices[1:], meta.out_cache_loc[1:] = 0, 0
    meta.page_table[0, 0] = 0
    assert torch.equal(alone.fused(backend, torch.empty_like(crowd.problem.q))[0], together)


def test_padding_rows_of_nan_reach_no_real_row_and_only_the_dummy_slot() -> None:
    heads = (32, 8, 128)
    backend = backend_for(heads)
    results = []
    for fill in (float("nan"), 0.5):
        step = make_step(heads, [200, 1, 3000, 1])
        p, meta = step.problem, step.problem.meta
        padding = [1, 3]
        meta.req_pool_indices[padding], meta.out_cache_loc[padding] = 0, 0
        meta.page_table[0, 0] = 0
        p.k_cache[:64], p.v_cache[:64] = fill, fill
        for rows in (p.q, step.k, step.v):
            rows[padding] = fill
        before = p.k_cache.clone()
        out = step.fused(backend, torch.full_like(p.q, 7.0))
        results.append(out[[0, 2]].clone())
        changed = (p.k_cache.nan_to_num(9.0) != before.nan_to_num(9.0)).flatten(1).any(1)
        allowed = torch.zeros_like(changed)
        allowed[meta.out_cache_loc] = True
        assert not bool((changed & ~allowed).any())
        assert bool(results[-1].isfinite().all())
    assert torch.equal(*results)


@pytest.mark.parametrize("bs", [1, 8, 96])
def test_one_captured_graph_serves_other_lengths(bs: int) -> None:
    """Replays are bit-equal to calls outside of the graph, and so is the second replay: the
    counters of arrived programs are as they were."""
    heads = (16, 8, 128)
    rng = random.Random(3)
    lens = [[rng.randint(1, 1500) for _ in range(bs)] for _ in range(3)]
    lens += [[1] * bs, [4200, *[2] * (bs - 1)]]
    steps = [make_step(heads, each, norm=True, seed=i) for i, each in enumerate(lens)]
    slots = max(len(step.problem.k_cache) for step in steps)
    static = make_step(heads, [1] * bs, norm=True)
    shape = (slots, *static.problem.k_cache.shape[1:])
    static.problem.k_cache = static.problem.k_cache.new_full(shape, float("nan"))
    static.problem.v_cache = torch.full_like(static.problem.k_cache, float("nan"))
    backend, out = backend_for(heads), torch.empty_like(static.problem.q)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        static.fused(backend, out)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        static.fused(backend, out)
    for step in [*steps, *reversed(steps)]:
        load(static, step)
        wanted = static.fused(backend, torch.empty_like(out)).clone()
        for _ in range(2):
            out.fill_(7.0)
            graph.replay()
            assert torch.equal(out, wanted)


def load(static: Step, step: Step) -> None:
    mine, new = static.problem, step.problem
    for old, value in (
        (mine.q, new.q),
        (static.k, step.k),
        (static.v, step.v),
        (static.rotary.positions, step.rotary.positions),
        (static.rotary.cos_sin, step.rotary.cos_sin),
        (static.rotary.q_norm, step.rotary.q_norm),
        (static.rotary.k_norm, step.rotary.k_norm),
        (mine.meta.page_table, new.meta.page_table),
        (mine.meta.req_pool_indices, new.meta.req_pool_indices),
        (mine.meta.seq_lens, new.meta.seq_lens),
        (mine.meta.out_cache_loc, new.meta.out_cache_loc),
        (mine.k_cache[: len(new.k_cache)], new.k_cache),
        (mine.v_cache[: len(new.v_cache)], new.v_cache),
    ):
        assert old is not None and value is not None
        old.copy_(value)


def test_wrong_keys_are_named() -> None:
    step = make_step((8, 8, 64), [3])
    step.k = step.k[:, :4]
    with pytest.raises(ValueError, match="k and v must be"):
        step.fused(backend_for((8, 8, 64)), torch.empty_like(step.problem.q))
