"""The CPU attention backend against a dense reference, with NaN in every slot that is nobody's."""

from __future__ import annotations

import itertools

import pytest
import torch

from duograph.kernels.attention.registry import create_backend
from duograph.kernels.attention.torch import TorchBackend
from duograph.tests.attention_cases import Problem, make_problem

CPU = torch.device("cpu")
HEADS = [(4, 4, 64), (6, 2, 32), (8, 1, 16), (9, 3, 64)]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


def backend_for(heads: tuple[int, int, int]) -> TorchBackend:
    q_heads, kv_heads, head_dim = heads
    return TorchBackend(num_q_heads=q_heads, num_kv_heads=kv_heads, head_dim=head_dim, device=CPU)


def problem_for(heads: tuple[int, int, int], **kwargs: object) -> Problem:
    q_heads, kv_heads, head_dim = heads
    arguments = {"page_size": 4, "dtype": torch.float32, "device": "cpu"} | kwargs
    return make_problem(
        num_q_heads=q_heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        **arguments,  # type: ignore[arg-type]
    )


def check(out: torch.Tensor, problem: Problem, rows: int) -> None:
    limit = TOLERANCE[problem.q.dtype]
    torch.testing.assert_close(out[:rows].float(), problem.expected[:rows], atol=limit, rtol=limit)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("seq_lens", [[1], [17], [5, 5, 5], [1, 300, 7, 64, 65, 130, 2]])
def test_decode_matches_dense_attention(
    heads: tuple[int, int, int], seq_lens: list[int], dtype: torch.dtype
) -> None:
    problem = problem_for(heads, seq_lens=seq_lens, dtype=dtype)
    out = torch.full_like(problem.q, float("nan"))
    backend_for(heads).decode(
        problem.q, problem.k_cache, problem.v_cache, problem.meta, out, problem.scale
    )
    check(out, problem, len(seq_lens))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize(
    ("seq_lens", "extend_lens"),
    [([1], [1]), ([9], [9]), ([30], [7]), ([33, 5, 12, 70], [33, 1, 5, 6])],
)
def test_extend_matches_dense_attention(
    heads: tuple[int, int, int],
    seq_lens: list[int],
    extend_lens: list[int],
    dtype: torch.dtype,
) -> None:
    problem = problem_for(heads, seq_lens=seq_lens, extend_lens=extend_lens, dtype=dtype)
    out = torch.full_like(problem.q, float("nan"))
    backend_for(heads).extend(
        problem.q, problem.k_cache, problem.v_cache, problem.meta, out, problem.scale
    )
    check(out, problem, sum(extend_lens))


def test_extend_leaves_padding_rows_as_they_are() -> None:
    problem = problem_for((4, 2, 16), seq_lens=[9, 6], extend_lens=[4, 6], padding_rows=6)
    problem.meta.num_real_tokens = 10
    out = torch.full_like(problem.q, 7.0)
    backend_for((4, 2, 16)).extend(
        problem.q, problem.k_cache, problem.v_cache, problem.meta, out, problem.scale
    )
    check(out, problem, 10)
    assert (out[10:] == 7.0).all()


def test_decode_padding_sequences_do_not_reach_real_rows() -> None:
    """Rows of the dummy request read the dummy slot, whatever it holds."""
    problem = problem_for((4, 2, 16), seq_lens=[9, 40])
    meta = problem.meta
    meta.page_table[0] = 0
    meta.req_pool_indices = torch.cat([meta.req_pool_indices, torch.zeros(2, dtype=torch.int64)])
    meta.seq_lens = torch.cat([meta.seq_lens, torch.ones(2, dtype=torch.int32)])
    q = torch.cat([problem.q, torch.full_like(problem.q, float("nan"))])
    answers = []
    for dummy in (float("nan"), 3.0):
        problem.k_cache[0] = problem.v_cache[0] = dummy
        out = torch.empty_like(q)
        backend_for((4, 2, 16)).decode(
            q, problem.k_cache, problem.v_cache, meta, out, problem.scale
        )
        check(out, problem, 2)
        answers.append(out[:2])
    assert torch.equal(answers[0], answers[1])


@pytest.mark.parametrize("changed", ["seq_lens", "page_table", "req_pool_indices"])
def test_a_write_to_the_static_buffers_is_seen_without_prepare(changed: str) -> None:
    """The plan is kept between layers, never past a change of what it was made from."""
    old = problem_for((4, 2, 16), seq_lens=[9, 9], seed=1, max_pages=4)
    backend = backend_for((4, 2, 16))
    arguments = (old.q, old.k_cache.nan_to_num(1.0), old.v_cache.nan_to_num(2.0), old.meta)
    before = torch.empty_like(old.q)
    backend.decode(*arguments, before, old.scale)
    if changed == "seq_lens":
        old.meta.seq_lens.copy_(torch.tensor([5, 7], dtype=torch.int32))
    elif changed == "page_table":
        old.meta.page_table.copy_(old.meta.page_table.clamp(max=1))
    else:
        old.meta.req_pool_indices.copy_(old.meta.req_pool_indices.flip(0))
    after, fresh = torch.empty_like(old.q), torch.empty_like(old.q)
    backend.decode(*arguments, after, old.scale)
    backend_for((4, 2, 16)).decode(*arguments, fresh, old.scale)
    assert torch.equal(after, fresh)
    assert not torch.equal(after, before)


def test_contiguous_and_scattered_pages_give_the_same_bits() -> None:
    problem = problem_for((4, 2, 16), seq_lens=[30], max_pages=8)
    row = int(problem.meta.req_pool_indices[0])
    scattered = torch.empty_like(problem.q)
    arguments = (problem.meta, scattered, problem.scale)
    backend_for((4, 2, 16)).decode(problem.q, problem.k_cache, problem.v_cache, *arguments)
    pages = problem.meta.page_table[row, :8].to(torch.int64)
    slots = (pages[:, None] * 4 + torch.arange(4)).view(-1)
    k_cache, v_cache = problem.k_cache.clone(), problem.v_cache.clone()
    k_cache[4:36], v_cache[4:36] = problem.k_cache[slots], problem.v_cache[slots]
    problem.meta.page_table[row, :8] = torch.arange(1, 9, dtype=torch.int32)
    contiguous = torch.empty_like(problem.q)
    backend_for((4, 2, 16)).decode(
        problem.q, k_cache, v_cache, problem.meta, contiguous, problem.scale
    )
    assert torch.equal(scattered, contiguous)


@pytest.mark.parametrize(
    ("name", "heads", "message"),
    [
        ("flash", (4, 2), "unknown attention backend 'flash'"),
        ("triton", (4, 2), "needs a CUDA device"),
        ("torch", (4, 3), "no multiple"),
    ],
)
def test_a_backend_that_cannot_be_is_refused(
    name: str, heads: tuple[int, int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        create_backend(name, num_q_heads=heads[0], num_kv_heads=heads[1], head_dim=16, device=CPU)


def test_every_split_of_a_prompt_gives_the_same_answer() -> None:
    """Attention of a chunk over its cached prefix equals that of the whole."""
    whole = problem_for((4, 2, 16), seq_lens=[24], extend_lens=[24])
    backend = backend_for((4, 2, 16))
    caches = (whole.k_cache, whole.v_cache)
    for cut, end in itertools.pairwise([0, 1, 8, 13, 24]):
        meta = whole.meta
        meta.seq_lens = torch.tensor([end], dtype=torch.int32)
        meta.query_start_loc = torch.tensor([0, end - cut], dtype=torch.int32)
        out = torch.empty(end - cut, 4, 16)
        backend.extend(whole.q[cut:end], *caches, meta, out, whole.scale)
        torch.testing.assert_close(out, whole.expected[cut:end], atol=2e-5, rtol=2e-5)
