"""FlashInfer's kernels, planned as a server plans them, against a dense float32 answer."""

from __future__ import annotations

import importlib.util
import random
from dataclasses import replace

import pytest
import torch

from duograph.kernels.attention.base import AttentionBackend
from duograph.kernels.attention.new_rows import ExtendsNewRows
from duograph.kernels.attention.registry import create_backend
from duograph.tests.attention_cases import Problem, assert_close, make_problem

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(
        importlib.util.find_spec("flashinfer") is None, reason="flashinfer is not installed"
    ),
]

Heads = tuple[int, int, int]

HEADS = [(32, 8, 64), (32, 8, 128), (8, 8, 128), (8, 1, 64), (16, 8, 128)]
MAX_PAGES = 128


def problem_for(
    heads: Heads,
    seq_lens: list[int],
    extend_lens: list[int] | None = None,
    *,
    page_size: int = 64,
    padding_rows: int = 0,
    seed: int = 0,
) -> Problem:
    """Every slot of no sequence holds NaN."""
    q_heads, kv_heads, dim = heads
    problem = make_problem(
        seq_lens=seq_lens,
        extend_lens=extend_lens,
        num_q_heads=q_heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        page_size=page_size,
        dtype=torch.bfloat16,
        device="cuda",
        max_pages=MAX_PAGES,
        padding_rows=padding_rows,
        seed=seed,
    )
    problem.meta.seq_lens_cpu = torch.tensor(seq_lens, dtype=torch.int32)
    problem.meta.extend_lens = extend_lens
    return problem


def backend_for(heads: Heads, name: str = "flashinfer") -> AttentionBackend:
    q_heads, kv_heads, dim = heads
    return create_backend(
        name,
        num_q_heads=q_heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        device=torch.device("cuda"),
        dtype=torch.bfloat16,
    )


def run(backend: AttentionBackend, problem: Problem) -> torch.Tensor:
    out = torch.zeros(problem.q.shape, dtype=problem.q.dtype, device="cuda")
    backend.prepare(problem.meta)
    call = backend.decode if problem.meta.query_start_loc is None else backend.extend
    call(problem.q, problem.k_cache, problem.v_cache, problem.meta, out, problem.scale)
    return out


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("page_size", [16, 64])
def test_decode_of_long_and_short_together(heads: Heads, page_size: int) -> None:
    backend = backend_for(heads)
    for lens in ([1], [2000, 1, page_size, page_size + 1, 63, 700], [5, 1, 1500, 16, 64, 65]):
        problem = problem_for(heads, lens, page_size=page_size, seed=len(lens))
        problem = same_table(problem, rows=12)
        assert_close(run(backend, problem), problem)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("page_size", [16, 64])
def test_extend_of_ragged_sequences_with_and_without_a_prefix(heads: Heads, page_size: int) -> None:
    backend = backend_for(heads)
    cases = (
        ([1, 70, 650, 300, 33, 257], [1, 70, 20, 1, 32, 256]),
        ([1800], [1800]),
        ([1900], [300]),
    )
    for seq_lens, extend_lens in cases:
        problem = problem_for(heads, seq_lens, extend_lens, page_size=page_size, padding_rows=9)
        problem = same_table(problem, rows=12)
        assert_close(run(backend, problem), problem)


@pytest.mark.parametrize("heads", HEADS)
def test_steps_without_prefixes_are_read_by_rows(heads: Heads) -> None:
    """The same answer from the new rows alone as from the pages that they were written to."""
    q_heads, kv_heads, dim = heads
    backend = backend_for(heads)
    assert isinstance(backend, ExtendsNewRows)
    for lens in ([1], [300, 1, 65, 700], [1800]):
        problem = same_table(problem_for(heads, lens, lens, padding_rows=9), rows=12)
        total = sum(lens)
        fused = torch.full((total + 9, q_heads + 2 * kv_heads, dim), float("nan")).to(problem.q)
        q, k, v = fused.split_with_sizes((q_heads, kv_heads, kv_heads), dim=1)
        q.copy_(problem.q)
        slots = slots_of(problem, lens)
        k[:total], v[:total] = problem.k_cache[slots], problem.v_cache[slots]
        out = torch.zeros(q.shape, dtype=q.dtype, device="cuda")
        backend.prepare(problem.meta)
        done = backend.extend_new_rows(q, k, v, problem.meta, out, problem.scale)
        if torch.cuda.get_device_capability()[0] == 9:
            assert done
            assert_close(out, problem)
        else:
            assert not done


def test_a_step_with_a_prefix_is_not_read_by_rows() -> None:
    heads = (32, 8, 128)
    backend = backend_for(heads)
    assert isinstance(backend, ExtendsNewRows)
    problem = problem_for(heads, [300, 40], [20, 40])
    backend.prepare(problem.meta)
    rows = torch.zeros(60, 8, 128, dtype=torch.bfloat16, device="cuda")
    out = torch.zeros(problem.q.shape, dtype=problem.q.dtype, device="cuda")
    assert not backend.extend_new_rows(problem.q, rows, rows, problem.meta, out, problem.scale)
    assert not out.any()


def slots_of(problem: Problem, lens: list[int]) -> torch.Tensor:
    """KV slots of all tokens, sequence after sequence."""
    table = problem.meta.page_table[problem.meta.req_pool_indices].long()
    size = problem.meta.page_size
    found = []
    for row, length in zip(table, lens, strict=True):
        token = torch.arange(length, device="cuda")
        found.append(row[token // size] * size + token % size)
    return torch.cat(found)


@pytest.mark.parametrize("heads", [(32, 8, 64), (16, 8, 128)])
@pytest.mark.parametrize("phase", ["decode", "extend"])
def test_same_as_the_torch_backend(heads: Heads, phase: str) -> None:
    extends = [1, 50, 1, 130] if phase == "extend" else None
    problem = problem_for(heads, [1, 77, 1030, 130], extends)
    mine, twin = (run(backend_for(heads, name), problem) for name in ("flashinfer", "torch"))
    torch.testing.assert_close(mine, twin, atol=1.6e-2, rtol=1.6e-2)


def same_table(problem: Problem, rows: int) -> Problem:
    """The same problem with a page table of ``rows`` rows, as one server's steps have."""
    table = problem.meta.page_table
    grown = table.new_zeros(rows, table.shape[1])
    grown[: len(table)] = table
    problem.meta.page_table = grown
    return problem


class StaticDecode:
    """Permanent buffers, one captured decode over them, and the plan before a replay."""

    def __init__(self, heads: Heads, first: Problem, slots: int) -> None:
        self.problem = replace(
            first,
            q=torch.empty_like(first.q),
            k_cache=first.k_cache.new_full((slots, *first.k_cache.shape[1:]), float("nan")),
            v_cache=first.v_cache.new_full((slots, *first.v_cache.shape[1:]), float("nan")),
        )
        self.backend = backend_for(heads)
        self.out = torch.zeros(first.q.shape, dtype=first.q.dtype, device="cuda")
        self.load(first)
        self.backend.prepare(self.problem.meta)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self.decode()
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.decode()

    def decode(self) -> None:
        mine = self.problem
        self.backend.decode(mine.q, mine.k_cache, mine.v_cache, mine.meta, self.out, mine.scale)

    def load(self, new: Problem) -> None:
        mine = self.problem
        mine.q.copy_(new.q)
        mine.k_cache[: len(new.k_cache)].copy_(new.k_cache)
        mine.v_cache[: len(new.v_cache)].copy_(new.v_cache)
        mine.meta.page_table.copy_(new.meta.page_table)
        mine.meta.req_pool_indices.copy_(new.meta.req_pool_indices)
        mine.meta.seq_lens.copy_(new.meta.seq_lens)
        mine.meta.seq_lens_cpu = new.meta.seq_lens_cpu

    def replay(self, new: Problem) -> torch.Tensor:
        self.load(new)
        self.out.fill_(7.0)
        self.backend.prepare(self.problem.meta)
        self.graph.replay()
        return self.out


@pytest.mark.parametrize("heads", [(32, 8, 64), (32, 8, 128), (16, 8, 128)])
@pytest.mark.parametrize("bs", [1, 8, 40])
def test_replays_with_other_lengths_are_right_and_bit_equal_to_eager(heads: Heads, bs: int) -> None:
    rng = random.Random(3)
    lens = [[rng.randint(1, 1500) for _ in range(bs)] for _ in range(3)]
    lens += [[1] * bs, [4200, *[2] * (bs - 1)]]
    problems = [problem_for(heads, each, seed=i) for i, each in enumerate(lens)]
    slots = max(len(problem.k_cache) for problem in problems)
    # Captured at length 1, as a runner does it.
    static = StaticDecode(heads, problem_for(heads, [1] * bs), slots)
    for problem in [*problems, *reversed(problems)]:
        replayed = static.replay(problem).clone()
        static.problem.expected = problem.expected
        assert_close(replayed, static.problem)
        static.out.fill_(9.0)
        static.backend.prepare(static.problem.meta)
        static.decode()
        assert torch.equal(static.out, replayed)


def test_plans_made_ahead_of_the_device_are_not_mixed_up() -> None:
    """The next plan is made while the device is far behind, as in an overlapped loop."""
    heads, bs = (32, 8, 64), 8
    problems = [problem_for(heads, [1 + 37 * i + j for j in range(bs)], seed=i) for i in range(12)]
    slots = max(len(problem.k_cache) for problem in problems)
    static = StaticDecode(heads, problem_for(heads, [1] * bs), slots)
    results = []
    for problem in problems:
        torch.cuda._sleep(2_000_000)  # about a millisecond
        results.append(static.replay(problem).clone())
    for problem, result in zip(problems, results, strict=True):
        assert_close(result, replace(static.problem, expected=problem.expected))


def test_real_rows_do_not_depend_on_the_dummy_slot() -> None:
    heads = (32, 8, 128)
    problem = problem_for(heads, [200, 1, 3000, 1])
    rows, table = problem.meta.req_pool_indices, problem.meta.page_table
    rows[1] = rows[3] = 0
    table[0, 0] = 0
    results = []
    for fill in (float("nan"), 0.0):
        problem.k_cache[:64], problem.v_cache[:64] = fill, fill
        results.append(run(backend_for(heads), problem)[[0, 2]].clone())
    assert torch.equal(*results)
    assert not results[0].isnan().any()


def test_two_hundred_mixed_steps_of_one_backend() -> None:
    heads, rng = (32, 8, 64), random.Random(11)
    backend = backend_for(heads)
    for step in range(200):
        bs = rng.choice((1, 2, 3, 8))
        lens = [rng.randint(1, 900) for _ in range(bs)]
        extends = [rng.randint(1, min(n, 150)) for n in lens] if step % 3 == 0 else None
        padding = rng.choice((0, 5)) if extends else 0
        problem = problem_for(heads, lens, extends, padding_rows=padding, seed=step)
        problem = same_table(problem, rows=12)
        assert_close(run(backend, problem), problem)


def test_lengths_on_the_host_are_asked_for_by_name() -> None:
    problem = problem_for((32, 8, 64), [3])
    problem.meta.seq_lens_cpu = None
    with pytest.raises(ValueError, match="seq_lens_cpu"):
        backend_for((32, 8, 64)).prepare(problem.meta)
