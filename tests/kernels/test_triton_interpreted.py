r"""The Triton kernels' logic without a GPU, through Triton's interpreter:

    TRITON_INTERPRET=1 pytest tests/kernels/test_triton_interpreted.py \
        tests/kernels/test_triton_attention_interpreted.py

Skipped otherwise: triton decides at its import whether it interprets or compiles.
"""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("set TRITON_INTERPRET=1", allow_module_level=True)

from duograph.kernels import (
    bitmask,
    bitmask_triton,
    embedding_triton,
    fused,
    fused_triton,
    sampling,
    sampling_filters_triton,
    sampling_triton,
    step_inputs,
    step_inputs_triton,
)
from duograph.kernels.few_rows_triton import few_rows_linear
from duograph.kernels.gemv_triton import fused_gemv
from duograph.kernels.step_inputs import DecodeTargets, ExtendTargets, Layout, Tables
from duograph.runners.sampling_params import SamplingParams
from duograph.runners.step_inputs import StepInputs


@pytest.mark.parametrize("width", [576, 128, 1000])
def test_norms_match_their_twins(width: int) -> None:
    x, residual, weight = torch.randn(5, width), torch.randn(5, width), torch.randn(width)
    torch.testing.assert_close(
        fused_triton.rms_norm(x, weight, 1e-5), fused.rms_norm(x, weight, 1e-5)
    )
    mine, twin = (f.add_rms_norm(x, residual, weight, 1e-5) for f in (fused_triton, fused))
    torch.testing.assert_close(mine, twin)
    in_place = fused_triton.add_rms_norm_(x, residual, weight, 1e-5)
    assert in_place[0] is x and in_place[1] is residual
    assert torch.equal(x, mine[0]) and torch.equal(residual, mine[1])


@pytest.mark.parametrize("width", [576, 128, 1000])
def test_embedding_with_and_without_norm_matches_its_twin(width: int) -> None:
    table, weight = torch.randn(50, width), torch.randn(width)
    input_ids = torch.tensor([49, 0, 7, 7, 12])
    mine, twin = (
        f.embed_rms_norm(input_ids, table, weight, 1e-5) for f in (embedding_triton, fused)
    )
    torch.testing.assert_close(mine, twin)
    assert torch.equal(mine[1], twin[1])
    assert torch.equal(embedding_triton.embedding(input_ids, table), twin[1])


def test_norm_of_heads_inside_a_fused_projection() -> None:
    qkv = torch.randn(7, 10 * 16)
    heads = qkv[:, 32:112].unflatten(1, (5, 16))
    weight = torch.randn(16)
    torch.testing.assert_close(
        fused_triton.rms_norm(heads, weight, 1e-6), fused.rms_norm(heads, weight, 1e-6)
    )


@pytest.mark.parametrize("width", [64, 1536])
def test_silu_and_mul_matches_its_twin(width: int) -> None:
    gate_up = torch.randn(3, 2 * width)
    torch.testing.assert_close(fused_triton.silu_and_mul(gate_up), fused.silu_and_mul(gate_up))


@pytest.mark.parametrize("heads", [(9, 3, 64), (4, 4, 80), (16, 1, 16)])
@pytest.mark.parametrize("norm", [False, True])
def test_rope_and_cache_matches_its_twin(heads: tuple[int, int, int], norm: bool) -> None:
    q_heads, kv_heads, dim = heads
    qkv = torch.randn(6, (q_heads + 2 * kv_heads) * dim)
    positions, slots = torch.tensor([0, 1, 5, 90, 7, 0]), torch.tensor([4, 9, 2, 7, 11, 0])
    cos_sin = torch.randn(100, dim)
    q_norm, k_norm = torch.randn(2, dim) if norm else (None, None)
    weights = {"q_norm": q_norm, "k_norm": k_norm, "eps": 1e-5}
    results = []
    for module in (fused_triton, fused):
        rows = qkv.clone().unflatten(1, (q_heads + 2 * kv_heads, dim))
        q, k, v = rows.split([q_heads, kv_heads, kv_heads], 1)
        pool = torch.full((2, 12, kv_heads, dim), 7.0)
        module.rope_and_cache(q, k, v, positions, cos_sin, pool[0], pool[1], slots, **weights)
        results.append((rows, pool))
    torch.testing.assert_close(results[0], results[1])


VOCAB = 20000


def sampling_rows(n: int) -> dict[str, torch.Tensor]:
    """Every combination of filters, greedy rows included; n is a multiple of 24."""
    options = [
        (t, k, p, m)
        for t in (0.0, 0.7, 1.5)
        for k in (-1, 40)
        for p in (1.0, 0.9)
        for m in (0.0, 0.05)
    ]
    columns = torch.tensor(options * (n // len(options)))
    return {
        "temperature": columns[:, 0].contiguous(),
        "top_k": columns[:, 1].to(torch.int32),
        "top_p": columns[:, 2].contiguous(),
        "min_p": columns[:, 3].contiguous(),
    }


@pytest.mark.parametrize("rounded", [False, True])  # True: many equal logits
def test_boundaries_keep_what_the_sorting_twin_keeps(rounded: bool) -> None:
    logits = torch.randn(24, VOCAB) * 2
    logits[:, 77] = float("-inf")
    if rounded:
        logits = logits.bfloat16().float()
    options = sampling_rows(24)
    edge, last = sampling_filters_triton.boundaries(logits, **options)
    bits = logits.view(torch.int32)
    keys = torch.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)
    ids = torch.arange(VOCAB)
    kept = (keys > edge[:, None]) | ((keys == edge[:, None]) & (ids <= last[:, None]))
    heat = options.pop("temperature")
    twin = sampling.filter_logits(logits / heat.clamp(min=1e-5)[:, None], **options)
    wanted = twin > float("-inf")
    wanted |= (heat == 0)[:, None]
    kept[:, 77] = wanted[:, 77] = False  # banned either way
    # A running sum and a tree sum may disagree about one token at the boundary.
    assert int((kept != wanted).sum(1).max()) <= 1
    assert bool(kept.any(1).all())


@pytest.mark.parametrize("filtered", [False, True])
def test_sample_draws_the_twins_tokens(filtered: bool) -> None:
    logits = torch.randn(24, VOCAB) * 2
    options = sampling_rows(24)
    seed = torch.randint(-(2**62), 2**62, (24,))
    position = torch.randint(0, 10000, (24,))
    drawn = [
        module.sample(logits, **options, seed=seed, position=position, filtered=filtered)
        for module in (sampling_triton, sampling)
    ]
    assert torch.equal(*drawn)


def test_tiny_top_p_and_one_token_top_k_leave_the_most_likely() -> None:
    logits = torch.randn(3, VOCAB)
    logits[:, [5, 9]] = 50.0
    tokens = sampling_triton.sample(
        logits,
        temperature=torch.ones(3),
        top_k=torch.tensor([1, -1, -1]),
        top_p=torch.tensor([1.0, 1e-38, 1.0]),
        min_p=torch.tensor([0.0, 0.0, 1.0]),
        seed=torch.arange(3),
        position=torch.zeros(3, dtype=torch.int64),
        filtered=True,
    )
    assert tokens[:2].tolist() == [5, 5]
    assert tokens[2] in (5, 9)  # min_p 1 keeps all that equal the maximum


@pytest.mark.parametrize("rows", [1, 3, 4])
@pytest.mark.parametrize("shape", [(100, 256), (64, 8192), (33, 600)])
def test_fused_gemv_matches_the_chain(rows: int, shape: tuple[int, int]) -> None:
    n, k = shape
    weight, norm_weight = torch.randn(n, k) / k**0.5, torch.randn(k)
    x, residual = torch.randn(rows, k), torch.randn(rows, n)
    up = torch.randn(2 * n, k) / k**0.5
    close = partial(torch.testing.assert_close, atol=2e-5, rtol=2e-5)
    close(fused_gemv(x, weight), x @ weight.T)
    close(
        fused_gemv(x, weight, norm_weight=norm_weight, eps=1e-5),
        fused.rms_norm(x, norm_weight, 1e-5) @ weight.T,
    )
    close(fused_gemv(x, weight, residual=residual), x @ weight.T + residual)
    close(
        fused_gemv(x, up, norm_weight=norm_weight, eps=1e-5, gated=True, residual=residual),
        fused.silu_and_mul(fused.rms_norm(x, norm_weight, 1e-5) @ up.T) + residual,
    )


@pytest.mark.parametrize("rows", [1, 7, 16])
@pytest.mark.parametrize("shape", [(64, 512), (48, 1024), (16, 2048)])
def test_few_rows_linear_is_a_product(rows: int, shape: tuple[int, int]) -> None:
    weight, x = torch.randn(shape) / shape[1] ** 0.5, torch.randn(rows, shape[1])
    torch.testing.assert_close(few_rows_linear(x, weight), x @ weight.T, atol=2e-5, rtol=2e-5)
    with pytest.raises(ValueError, match="do not fit"):
        few_rows_linear(x[:, :500].contiguous(), weight[:, :500].contiguous())
    with pytest.raises(ValueError, match="16 rows"):
        few_rows_linear(torch.randn(17, shape[1]), weight)


def test_fused_gemv_names_what_does_not_fit() -> None:
    x, weight = torch.randn(1, 32), torch.randn(8, 32)
    with pytest.raises(ValueError, match="1 to 4 rows"):
        fused_gemv(torch.randn(5, 32), weight)
    with pytest.raises(ValueError, match="residual must be"):
        fused_gemv(x, weight, residual=torch.randn(1, 9))
    with pytest.raises(ValueError, match="does not fit"):
        fused_gemv(x, torch.randn(7, 32), gated=True)
    with pytest.raises(ValueError, match="one dtype"):
        fused_gemv(x.half(), weight)


@pytest.mark.parametrize("vocab", [33, 4096, 5000])
def test_masked_logits_are_those_of_the_definition(vocab: int) -> None:
    logits = torch.randn(4, vocab)
    index = torch.tensor([3, 1])
    words = bitmask.bitmask_words(vocab)
    bits = torch.randint(-(2**31), 2**31 - 1, (2, words)).to(torch.int32)
    expected = bitmask._masked_by_tensor_ops(logits, index, bits)
    assert torch.equal(bitmask_triton.masked_logits(logits, index, bits), expected)


def load(module: Any, layout: Layout, words: torch.Tensor, padded: int) -> list[torch.Tensor]:
    """All that the step's inputs are written to, on the CPU."""
    rows = 9

    def vector(size: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.full((size,), -7, dtype=dtype)

    int32 = torch.int32
    tables = Tables(
        torch.zeros(rows, 5, dtype=int32),
        torch.zeros(2, rows, dtype=torch.int64),
        torch.zeros(6, rows),
        torch.arange(rows) + 50,
    )
    if layout.tokens:
        by_row = (vector(8), vector(8, int32), vector(9, int32), vector(8))
        extend = ExtendTargets(*by_row, *(vector(2048) for _ in range(3)))
        module.load_extend(words, layout, tables, extend, longest=1300, padded=padded, page_size=64)
        return [*tables, *extend]
    decode = DecodeTargets(vector(8), vector(8, int32), vector(8), vector(8), vector(8))
    module.load_decode(words, layout, tables, decode, padded=padded, page_size=64)
    return [*tables, *decode]


def test_step_inputs_match_their_twin() -> None:
    params = SamplingParams(temperature=0.5, top_k=7, seed=-(2**63))
    more: dict[str, Any] = {
        "page_updates": [(3, 0, 7), (3, 2, 9), (1, 1, 4)],
        "row_inits": [(4, params), (2, SamplingParams(seed=5))],
    }
    prompts = [torch.arange(1300).numpy(), torch.arange(5).numpy() + 9]
    steps = [
        (StepInputs.decode([3, 1, 2], [129, 64, 1], [7, 8, 9], **more), 8),
        (
            StepInputs.extend(
                [3, 1],
                [1300, 67],
                [*range(40, 61), 70, 71],
                starts=[0, 62],
                tokens=prompts,
                page_size=64,
                **more,
            ),
            2048,
        ),
    ]
    for inputs, padded in steps:
        mine, twin = (
            load(module, inputs.layout, inputs.words, padded)
            for module in (step_inputs_triton, step_inputs)
        )
        assert all(torch.equal(*pair) for pair in zip(mine, twin, strict=True))
