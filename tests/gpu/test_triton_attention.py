"""The compiled Triton attention kernels against a dense float32 answer and TorchBackend."""

from __future__ import annotations

import random

import pytest
import torch

from duograph.kernels.attention.base import AttentionBackend
from duograph.kernels.attention.registry import create_backend
from duograph.tests.attention_cases import Problem, assert_close, make_problem, tolerance

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

HEADS = [(32, 8, 128), (32, 8, 64), (9, 3, 64), (6, 6, 80), (8, 1, 128), (14, 2, 64), (4, 2, 256)]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def backend(heads: tuple[int, int, int], name: str = "triton") -> AttentionBackend:
    q_heads, kv_heads, dim = heads
    device = torch.device("cuda")
    return create_backend(
        name, num_q_heads=q_heads, num_kv_heads=kv_heads, head_dim=dim, device=device
    )


def problem_for(
    heads: tuple[int, int, int],
    *,
    seq_lens: list[int],
    extend_lens: list[int] | None = None,
    page_size: int = 16,
    dtype: torch.dtype = torch.bfloat16,
    max_pages: int | None = None,
    padding_rows: int = 0,
    seed: int = 0,
) -> Problem:
    q_heads, kv_heads, dim = heads
    return make_problem(
        seq_lens=seq_lens,
        extend_lens=extend_lens,
        num_q_heads=q_heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        page_size=page_size,
        dtype=dtype,
        device="cuda",
        max_pages=max_pages,
        padding_rows=padding_rows,
        seed=seed,
    )


def run_decode(runner: AttentionBackend, problem: Problem, out: torch.Tensor) -> torch.Tensor:
    runner.decode(problem.q, problem.k_cache, problem.v_cache, problem.meta, out, problem.scale)
    return out


def run_extend(runner: AttentionBackend, problem: Problem, out: torch.Tensor) -> torch.Tensor:
    runner.extend(problem.q, problem.k_cache, problem.v_cache, problem.meta, out, problem.scale)
    return out


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_decode_at_page_edges(heads: tuple[int, int, int], dtype: torch.dtype) -> None:
    for page_size in (1, 16, 64, 100, 256):
        lens = [1, page_size, page_size + 1, 2 * page_size - 1 or 1, 127, 128, 129]
        problem = problem_for(heads, seq_lens=lens, page_size=page_size, dtype=dtype)
        out = torch.full_like(problem.q, 7.0)
        assert_close(run_decode(backend(heads), problem, out), problem)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("bs", [1, 5, 20, 70])  # each with a tile of its own
def test_decode_of_long_and_short_together(heads: tuple[int, int, int], bs: int) -> None:
    rng = random.Random(bs)
    lens = [5003] + [rng.randint(1, 600) for _ in range(bs - 1)]
    problem = problem_for(heads, seq_lens=lens, max_pages=2048)
    runner = backend(heads)
    for _ in range(2):  # the second run meets the first one's leftovers in the scratch
        assert_close(run_decode(runner, problem, torch.full_like(problem.q, 7.0)), problem)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_extend_of_ragged_sequences(heads: tuple[int, int, int], dtype: torch.dtype) -> None:
    for page_size in (1, 16, 100, 256):
        problem = problem_for(
            heads,
            seq_lens=[1, 70, 650, 300, 33, 257],
            extend_lens=[1, 70, 20, 1, 32, 256],
            page_size=page_size,
            dtype=dtype,
            padding_rows=9,
        )
        assert_close(run_extend(backend(heads), problem, torch.zeros_like(problem.q)), problem)


@pytest.mark.parametrize("heads", [(32, 8, 128), (32, 8, 64), (9, 3, 64)])
def test_extend_of_a_long_prompt_behind_a_prefix(heads: tuple[int, int, int]) -> None:
    problem = problem_for(heads, seq_lens=[4500], extend_lens=[2100], page_size=64)
    assert_close(run_extend(backend(heads), problem, torch.zeros_like(problem.q)), problem)


def test_small_extends_take_the_small_tile() -> None:
    heads = (32, 8, 128)
    problem = problem_for(heads, seq_lens=[40, 2000, 7], extend_lens=[3, 1, 7])
    assert_close(run_extend(backend(heads), problem, torch.zeros_like(problem.q)), problem)


@pytest.mark.parametrize("mode", ["decode", "extend"])
def test_same_as_torch_backend_in_float32(mode: str) -> None:
    heads = (32, 8, 128)
    extends = [1, 50, 1, 130] if mode == "extend" else None
    problem = problem_for(
        heads, seq_lens=[1, 77, 1030, 130], extend_lens=extends, dtype=torch.float32
    )
    run = run_extend if mode == "extend" else run_decode
    mine = run(backend(heads), problem, torch.zeros_like(problem.q))
    twin = run(backend(heads, "torch"), problem, torch.zeros_like(problem.q))
    torch.testing.assert_close(mine, twin, atol=tolerance(torch.float32), rtol=1e-4)


class StaticDecode:
    """Permanent buffers, one captured decode over them, and the refill before a replay."""

    def __init__(self, heads: tuple[int, int, int], first: Problem, slots: int) -> None:
        self.problem = Problem(
            q=torch.empty_like(first.q),
            k_cache=first.k_cache.new_full((slots, *first.k_cache.shape[1:]), float("nan")),
            v_cache=first.v_cache.new_full((slots, *first.v_cache.shape[1:]), float("nan")),
            meta=first.meta,
            scale=first.scale,
            expected=first.expected,
        )
        self.runner = backend(heads)
        self.out = torch.full_like(first.q, 7.0)
        self.load(first)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            run_decode(self.runner, self.problem, self.out)
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            run_decode(self.runner, self.problem, self.out)

    def load(self, new: Problem) -> None:
        mine = self.problem
        mine.q.copy_(new.q)
        mine.k_cache[: len(new.k_cache)].copy_(new.k_cache)
        mine.v_cache[: len(new.v_cache)].copy_(new.v_cache)
        mine.meta.page_table.copy_(new.meta.page_table)
        mine.meta.req_pool_indices.copy_(new.meta.req_pool_indices)
        mine.meta.seq_lens.copy_(new.meta.seq_lens)
        mine.expected = new.expected
        self.out.fill_(7.0)

    def replay(self, new: Problem) -> None:
        self.load(new)
        self.graph.replay()
        assert_close(self.out, self.problem)


@pytest.mark.parametrize("bs", [1, 8, 96])
def test_one_captured_graph_serves_other_lengths(bs: int) -> None:
    heads = (32, 8, 128)
    rng = random.Random(3)
    lens = [[rng.randint(1, 1500) for _ in range(bs)] for _ in range(3)]
    lens += [[1] * bs, [4200, *[2] * (bs - 1)]]
    pages = 300  # columns of the table: 4800 tokens
    problems = [
        problem_for(heads, seq_lens=each, max_pages=pages, seed=i) for i, each in enumerate(lens)
    ]
    slots = max(len(p.k_cache) for p in problems)
    # Captured at length 1, as a runner does it.
    capture = problem_for(heads, seq_lens=[1] * bs, max_pages=pages)
    static = StaticDecode(heads, capture, slots)
    for problem in [*problems, *reversed(problems)]:
        static.replay(problem)


def test_real_rows_do_not_depend_on_the_dummy_slot() -> None:
    heads = (32, 8, 128)
    problem = problem_for(heads, seq_lens=[200, 1, 3000, 1])
    rows, table = problem.meta.req_pool_indices, problem.meta.page_table
    rows[1] = rows[3] = 0
    table[0, 0] = 0
    results = []
    for fill in (float("nan"), 0.0):
        problem.k_cache[:16], problem.v_cache[:16] = fill, fill
        out = run_decode(backend(heads), problem, torch.full_like(problem.q, 7.0))
        results.append(out[[0, 2]].clone())
    assert torch.equal(*results)
    real = problem.expected[[0, 2]]
    torch.testing.assert_close(
        results[0].float().cpu(), real, atol=tolerance(torch.bfloat16), rtol=1.6e-2
    )
