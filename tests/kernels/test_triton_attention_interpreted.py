"""The Triton attention kernels' logic without a GPU, through Triton's interpreter; see
test_triton_interpreted.py."""

from __future__ import annotations

import os

import pytest
import torch

from duograph.tests.attention_cases import assert_close, make_problem

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("set TRITON_INTERPRET=1", allow_module_level=True)

from duograph.kernels import fused
from duograph.kernels.attention.fused_decode import Rotary
from duograph.kernels.attention.triton import TritonBackend
from duograph.kernels.attention.triton_plan import SplitPlan, TileConfig, plan_splits

CPU = torch.device("cpu")


def backend(q_heads: int, kv_heads: int, head_dim: int, programs: int) -> TritonBackend:
    return TritonBackend(
        num_q_heads=q_heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        device=CPU,
        target_programs=programs,
    )


HEADS = [(4, 4, 64), (6, 2, 32), (8, 1, 128), (5, 1, 80), (7, 1, 16)]


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("page_size", [1, 6, 16, 256])
@pytest.mark.parametrize("programs", [1, 40])
def test_decode_matches_dense(heads: tuple[int, int, int], page_size: int, programs: int) -> None:
    q_heads, kv_heads, dim = heads
    problem = make_problem(
        seq_lens=[1, page_size, page_size + 1, 300, 129],
        num_q_heads=q_heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        page_size=page_size,
        dtype=torch.float32,
        device="cpu",
        max_pages=-(-1024 // page_size),
    )
    out = torch.full_like(problem.q, 7.0)
    runner = backend(q_heads, kv_heads, dim, programs)
    for _ in range(2):  # the second call meets the leftovers of the first in its scratch
        out.fill_(7.0)
        runner.decode(problem.q, problem.k_cache, problem.v_cache, problem.meta, out, problem.scale)
        assert_close(out, problem)


@pytest.mark.parametrize("heads", [(6, 2, 32), (5, 1, 80)])
@pytest.mark.parametrize("programs", [1, 40])
def test_decode_with_early_loads_matches_dense(heads: tuple[int, int, int], programs: int) -> None:
    q_heads, kv_heads, dim = heads
    problem = make_problem(
        seq_lens=[1, 32, 33, 300, 129, 520],
        num_q_heads=q_heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        page_size=16,
        dtype=torch.float32,
        device="cpu",
        max_pages=64,
    )
    runner = TritonBackend(
        num_q_heads=q_heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        device=CPU,
        target_programs=programs,
        decode_tile=TileConfig(block_n=32, num_warps=4, num_stages=3, early=True),
    )
    out = torch.full_like(problem.q, 7.0)
    runner.decode(problem.q, problem.k_cache, problem.v_cache, problem.meta, out, problem.scale)
    assert_close(out, problem)


@pytest.mark.parametrize("heads", [(6, 2, 32), (5, 1, 80), (4, 4, 64)])
@pytest.mark.parametrize("programs", [1, 40])
@pytest.mark.parametrize("norm", [False, True])
def test_fused_decode_matches_the_separate_steps(
    heads: tuple[int, int, int], programs: int, norm: bool
) -> None:
    q_heads, kv_heads, dim = heads
    problem = make_problem(
        seq_lens=[1, 16, 17, 300, 129, 256, 257, 513],
        num_q_heads=q_heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        page_size=16,
        dtype=torch.float32,
        device="cpu",
        max_pages=64,
    )
    meta = problem.meta
    rows = torch.randn(8, q_heads + 2 * kv_heads, dim)
    q, k, v = rows.split([q_heads, kv_heads, kv_heads], 1)
    positions = meta.seq_lens.long() - 1
    pages = meta.page_table[meta.req_pool_indices, positions // 16].long()
    meta.out_cache_loc = pages * 16 + positions % 16
    cos_sin = torch.randn(600, dim)
    q_norm, k_norm = torch.rand(2, dim) if norm else (None, None)
    runner = backend(q_heads, kv_heads, dim, programs)

    pool = problem.k_cache.clone(), problem.v_cache.clone()
    turned = q.clone(), k.clone()
    fused.rope_and_cache(
        *turned,
        v,
        positions,
        cos_sin,
        *pool,
        meta.out_cache_loc,
        q_norm=q_norm,
        k_norm=k_norm,
        eps=1e-5,
    )
    wanted = torch.empty_like(q)
    runner.decode(turned[0], *pool, meta, wanted, problem.scale)

    mine = problem.k_cache, problem.v_cache
    for cache in mine:  # what is in the new slots must not be read
        cache[meta.out_cache_loc] = float("nan")
    rotary = Rotary(positions, cos_sin, q_norm, k_norm, 1e-5)
    for _ in range(2):  # the second call meets the counters as the first left them
        out = torch.full_like(q, 7.0)
        runner.decode_fused(q, k, v, rotary, *mine, meta, out, problem.scale)
        torch.testing.assert_close(out, wanted)
        torch.testing.assert_close(mine, pool, equal_nan=True)


def test_decode_half_precision() -> None:  # the interpreter has no bf16 dot
    problem = make_problem(
        seq_lens=[257, 3],
        num_q_heads=8,
        num_kv_heads=2,
        head_dim=64,
        page_size=16,
        dtype=torch.float16,
        device="cpu",
        max_pages=32,
    )
    out = torch.empty_like(problem.q)
    backend(8, 2, 64, 12).decode(
        problem.q, problem.k_cache, problem.v_cache, problem.meta, out, problem.scale
    )
    assert_close(out, problem)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("page_size", [1, 6, 16, 128])
def test_extend_matches_dense(heads: tuple[int, int, int], page_size: int) -> None:
    q_heads, kv_heads, dim = heads
    # The interpreter has no bf16 dot, so half precision is fp16.
    dtype = torch.float16 if page_size == 16 else torch.float32
    problem = make_problem(
        seq_lens=[1, 70, 150, 65, 33],
        extend_lens=[1, 70, 20, 1, 32],
        num_q_heads=q_heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        page_size=page_size,
        dtype=dtype,
        device="cpu",
        padding_rows=5,
    )
    out = torch.zeros_like(problem.q)
    backend(q_heads, kv_heads, dim, 1).extend(
        problem.q, problem.k_cache, problem.v_cache, problem.meta, out, problem.scale
    )
    assert_close(out, problem)  # padding rows included: they keep their zeros


def test_extend_leaves_rows_past_the_real_tokens_alone() -> None:
    problem = make_problem(
        seq_lens=[9, 4],
        extend_lens=[9, 4],
        num_q_heads=2,
        num_kv_heads=1,
        head_dim=16,
        page_size=4,
        dtype=torch.float32,
        device="cpu",
    )
    problem.meta.num_real_tokens = 9  # the second sequence is padding
    out = torch.full_like(problem.q, 7.0)
    backend(2, 1, 16, 1).extend(
        problem.q, problem.k_cache, problem.v_cache, problem.meta, out, problem.scale
    )
    torch.testing.assert_close(out[:9], problem.expected[:9], atol=2e-5, rtol=2e-5)
    assert bool((out[9:] == 7.0).all())


def test_scratch_is_kept_when_a_larger_one_is_needed() -> None:
    runner = backend(4, 4, 64, 1)
    small, _ = runner._partials(1, 2)
    large, _ = runner._partials(64, 8)
    assert small.data_ptr() in [t.data_ptr() for t in runner._scratch]
    assert runner._partials(2, 2)[0].data_ptr() == large.data_ptr()


def test_split_plan() -> None:
    assert plan_splits(8, 16384, 264) == SplitPlan(33, 256)
    assert plan_splits(8, 512, 264) == SplitPlan(2, 256)  # no more splits than chunks
    assert plan_splits(2048, 4095, 264).num_splits == 1
    assert plan_splits(2048, 131072, 264) == SplitPlan(4, 2048)


def test_wrong_shapes_are_named() -> None:
    problem = make_problem(
        seq_lens=[3],
        num_q_heads=2,
        num_kv_heads=1,
        head_dim=16,
        page_size=4,
        dtype=torch.float32,
        device="cpu",
    )
    args = (problem.q, problem.k_cache, problem.v_cache, problem.meta, problem.q, 1.0)
    with pytest.raises(ValueError, match="q and out must be"):
        backend(4, 1, 16, 1).decode(*args)
    with pytest.raises(ValueError, match="k_cache must be"):
        backend(2, 2, 16, 1).decode(*args)
    with pytest.raises(ValueError, match="query_start_loc"):
        backend(2, 1, 16, 1).extend(*args)
    with pytest.raises(ValueError, match="multiple of num_kv_heads"):
        backend(3, 2, 16, 1)
