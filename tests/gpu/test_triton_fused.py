"""The compiled element-wise kernels against their torch twins, computed in float32 on the CPU."""

from __future__ import annotations

import pytest
import torch

from duograph.kernels import fused, sampling

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
# Two roundings of values around one to four.
TOLERANCE = {torch.bfloat16: 3.2e-2, torch.float16: 4e-3, torch.float32: 2e-5}


def close(mine: torch.Tensor, twin: torch.Tensor) -> None:
    limit = TOLERANCE[mine.dtype]
    torch.testing.assert_close(mine.cpu(), twin, atol=limit, rtol=limit)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 576), (3, 4096), (257, 2048), (2, 16384), (0, 2048)])
def test_norms(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    x, residual = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    weight = torch.rand(shape[1]).to(dtype)
    close(
        fused.rms_norm(x.cuda(), weight.cuda(), 1e-5),
        fused.rms_norm(x.float(), weight.float(), 1e-5).to(dtype),
    )
    normed, added = fused.add_rms_norm(x.cuda(), residual.cuda(), weight.cuda(), 1e-5)
    assert torch.equal(added.cpu(), x + residual)
    close(normed, fused.rms_norm((x + residual).float(), weight.float(), 1e-5).to(dtype))
    in_place = fused.add_rms_norm_(x.cuda(), residual.cuda(), weight.cuda(), 1e-5)
    assert torch.equal(in_place[0], normed) and torch.equal(in_place[1], added)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [576, 1024, 4096, 16384])
@pytest.mark.parametrize("tokens", [0, 1, 8, 600])  # the last is too many to start early
def test_embedding_and_first_norm(dtype: torch.dtype, width: int, tokens: int) -> None:
    """The bits of the two by themselves."""
    table = torch.randn(3000, width, device="cuda").to(dtype)
    weight = torch.rand(width, device="cuda").to(dtype)
    input_ids = torch.randint(0, 3000, (tokens,), device="cuda")
    wanted = torch.nn.functional.embedding(input_ids, table)
    normed, rows = fused.embed_rms_norm(input_ids, table, weight, 1e-5)
    assert torch.equal(rows, wanted) and torch.equal(fused.embedding(input_ids, table), wanted)
    assert torch.equal(normed, fused.rms_norm(wanted, weight, 1e-5))


def test_embedding_reads_the_ids_that_the_kernel_before_left() -> None:
    """In a graph and behind a sampler's kernels, which let it start early."""
    vocab, width, bs = 20000, 512, 8
    table = torch.randn(vocab, width, device="cuda", dtype=torch.bfloat16)
    weight = torch.ones(width, device="cuda", dtype=torch.bfloat16)
    logits = torch.randn(bs, vocab, device="cuda")
    zeros, nothing = torch.zeros(bs, device="cuda"), torch.zeros(bs, dtype=torch.int64).cuda()
    options = {"temperature": zeros, "top_k": nothing, "top_p": zeros + 1, "min_p": zeros}

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        ids = sampling.sample(logits, **options, seed=nothing, position=nothing, filtered=False)
        return fused.embed_rms_norm(ids, table, weight, 1e-5)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        normed, rows = step()
    for _ in range(5):
        logits.normal_()
        graph.replay()
        wanted = table[logits.argmax(1)]
        assert torch.equal(rows, wanted)
        assert torch.equal(normed, fused.rms_norm(wanted, weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_of_heads_inside_a_fused_projection(dtype: torch.dtype) -> None:
    qkv = torch.randn(37, 40 * 128).to(dtype)
    weight = torch.rand(128).to(dtype)
    heads = qkv[:, 128 * 16 : 128 * 24].unflatten(1, (8, 128))
    on_gpu = qkv.cuda()[:, 128 * 16 : 128 * 24].unflatten(1, (8, 128))
    close(
        fused.rms_norm(on_gpu, weight.cuda(), 1e-6),
        fused.rms_norm(heads.float(), weight.float(), 1e-6).to(dtype),
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 3072), (5, 28672), (300, 16384), (0, 3072)])
def test_silu_and_mul(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    gate_up = torch.randn(shape).to(dtype)
    close(fused.silu_and_mul(gate_up.cuda()), fused.silu_and_mul(gate_up))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [(32, 8, 128), (32, 8, 64), (9, 3, 64), (5, 5, 80)])
@pytest.mark.parametrize("tokens", [1, 130])
@pytest.mark.parametrize("norm", [False, True])
def test_rope_and_cache(
    dtype: torch.dtype, heads: tuple[int, int, int], tokens: int, norm: bool
) -> None:
    q_heads, kv_heads, dim = heads
    total = q_heads + 2 * kv_heads
    qkv = torch.randn(tokens, total, dim).to(dtype)
    positions = torch.randint(0, 5000, (tokens,))
    slots = torch.randperm(tokens + 40)[:tokens]
    angles = torch.rand(5000, dim // 2) * 6.3
    cos_sin = torch.cat((angles.cos(), angles.sin()), 1)
    weights = torch.rand(2, dim).to(dtype)
    results = []
    for device in ("cuda", "cpu"):
        q_norm, k_norm = weights.to(device) if norm else (None, None)
        rows = qkv.to(device, copy=True)
        q, k, v = rows.split([q_heads, kv_heads, kv_heads], 1)
        pool = torch.full((2, tokens + 40, kv_heads, dim), 7.0, dtype=dtype, device=device)
        fused.rope_and_cache(
            q,
            k,
            v,
            positions.to(device),
            cos_sin.to(device),
            pool[0],
            pool[1],
            slots.to(device),
            q_norm=q_norm,
            k_norm=k_norm,
            eps=1e-6,
        )
        results.append((rows, pool))
    close(results[0][0], results[1][0])
    close(results[0][1], results[1][1])


def test_all_of_them_replay_in_one_graph() -> None:
    x, residual = (torch.randn(4, 2048, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    weight = torch.rand(2048, device="cuda", dtype=torch.bfloat16)

    def chain() -> torch.Tensor:
        normed, added = fused.add_rms_norm(x, residual, weight, 1e-5)
        return fused.silu_and_mul(torch.cat((normed, fused.rms_norm(added, weight, 1e-5)), 1))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        chain()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain()
    for _ in range(2):
        x.normal_()
        residual.normal_()
        graph.replay()
        assert torch.equal(out, chain())
