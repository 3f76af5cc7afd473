"""The torch twins of the fused kernels against formulas written out, and the KV write."""

from __future__ import annotations

import pytest
import torch

from duograph.kernels import fused
from duograph.kernels.kv_write import write_kv


def test_norm_and_activation_match_their_formulas() -> None:
    x, residual, weight = torch.randn(5, 32), torch.randn(5, 32), torch.rand(32)
    total = x + residual
    expected = total / (total.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    normed, added = fused.add_rms_norm(x, residual, weight, 1e-5)
    torch.testing.assert_close(normed, expected)
    torch.testing.assert_close(fused.rms_norm(total, weight, 1e-5), expected)
    assert torch.equal(added, total)
    in_place = fused.add_rms_norm_(x.clone(), residual, weight, 1e-5)
    assert torch.equal(in_place[0], normed) and torch.equal(in_place[1], total)
    assert in_place[1] is residual
    gate, up = x.chunk(2, dim=-1)
    torch.testing.assert_close(fused.silu_and_mul(x), gate * torch.sigmoid(gate) * up)


@pytest.mark.parametrize("dtypes", [(torch.float32,) * 2, (torch.bfloat16, torch.float32)])
def test_embedding_and_first_norm_are_as_the_two_by_themselves(
    dtypes: tuple[torch.dtype, torch.dtype],
) -> None:
    """Bit for bit; also where activations are wider than the table, as behind packed weights."""
    table, weight = torch.randn(20, 32).to(dtypes[0]), torch.rand(32).to(dtypes[1])
    input_ids = torch.tensor([3, 19, 0, 3])
    assert torch.equal(fused.embedding(input_ids, table), table[input_ids])
    normed, rows = fused.embed_rms_norm(input_ids, table, weight, 1e-5)
    assert rows.dtype == normed.dtype == dtypes[1]
    assert torch.equal(rows, table[input_ids].to(dtypes[1]))
    assert torch.equal(normed, fused.rms_norm(rows, weight, 1e-5))
    before = table.clone()
    rows.zero_()  # a new tensor: later layers overwrite it
    assert torch.equal(table, before)


def rotated(x: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """Rotation of each pair, one at a time."""
    out, half = x.clone().float(), x.shape[-1] // 2
    for t, position in enumerate(positions.tolist()):
        for i in range(half):
            cos, sin = cos_sin[position, i], cos_sin[position, half + i]
            a, b = x[t, :, i].float(), x[t, :, half + i].float()
            out[t, :, i], out[t, :, half + i] = a * cos - b * sin, b * cos + a * sin
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("merged", [True, False])
def test_rope_and_cache_rotates_and_writes(merged: bool, dtype: torch.dtype) -> None:
    """Also when q and k are views of one projection, which takes another path."""
    heads, kv_heads, dim = 6, 2, 8
    parts = torch.randn(5, heads + 2 * kv_heads, dim).to(dtype).split((heads, 2, 2), dim=1)
    q, k, v = parts if merged else (part.clone() for part in parts)
    angles = torch.rand(50, dim // 2) * 6
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)
    positions = torch.tensor([3, 49, 0, 7, 7])
    out_cache_loc = torch.tensor([4, 9, 1, 2, 11])
    expected_q, expected_k = rotated(q, positions, cos_sin), rotated(k, positions, cos_sin)
    old_v = v.clone()
    k_cache, v_cache = torch.full((2, 12, kv_heads, dim), -5.0, dtype=dtype)
    fused.rope_and_cache(q, k, v, positions, cos_sin, k_cache, v_cache, out_cache_loc)
    torch.testing.assert_close(q, expected_q.to(dtype))
    torch.testing.assert_close(k, expected_k.to(dtype))
    assert torch.equal(v, old_v)
    assert torch.equal(k_cache[out_cache_loc], k) and torch.equal(v_cache[out_cache_loc], v)
    others = [slot for slot in range(12) if slot not in out_cache_loc.tolist()]
    assert (k_cache[others] == -5.0).all() and (v_cache[others] == -5.0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rope_and_cache_norms_each_head_first(dtype: torch.dtype) -> None:
    positions, slots = torch.tensor([3, 0]), torch.tensor([1, 2])
    cos_sin = torch.rand(9, 8)
    q_norm, k_norm = torch.rand(2, 8).to(dtype)
    qkv = torch.randn(2, 5, 8).to(dtype)
    q, k, v = qkv.clone().split((3, 1, 1), dim=1)
    normed = (fused.rms_norm(q, q_norm, 1e-6), fused.rms_norm(k, k_norm, 1e-6))
    pools = torch.zeros(2, 2, 4, 1, 8, dtype=dtype)
    plain, with_norms = pools
    fused.rope_and_cache(*normed, v, positions, cos_sin, plain[0], plain[1], slots)
    fused.rope_and_cache(
        q,
        k,
        v,
        positions,
        cos_sin,
        with_norms[0],
        with_norms[1],
        slots,
        q_norm=q_norm,
        k_norm=k_norm,
        eps=1e-6,
    )
    torch.testing.assert_close((q, k), normed)
    torch.testing.assert_close(pools[1], pools[0])


def test_kv_write_converts_to_the_pools_type_and_touches_no_other_slot() -> None:
    k, v = torch.randn(3, 2, 4), torch.randn(3, 2, 4)
    k_cache, v_cache = torch.zeros(2, 6, 2, 4, dtype=torch.bfloat16)
    write_kv(k, v, k_cache, v_cache, torch.tensor([5, 0, 2]))
    assert torch.equal(k_cache[[5, 0, 2]], k.bfloat16())
    assert torch.equal(v_cache[[5, 0, 2]], v.bfloat16())
    assert not k_cache[[1, 3, 4]].any() and not v_cache[[1, 3, 4]].any()
