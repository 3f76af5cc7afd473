"""Token bitmasks: which logits stay, whatever the vocabulary's size."""

from __future__ import annotations

import pytest
import torch

from duograph.kernels import bitmask


def random_case(vocab: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(5, vocab, generator=generator).to(dtype)
    index = torch.tensor([4, 0, 2])
    words = bitmask.bitmask_words(vocab)
    bits = torch.randint(-(2**31), 2**31 - 1, (3, words), generator=generator).to(torch.int32)
    return logits, index, bits


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 384, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_tokens_with_a_set_bit_keep_their_logit(vocab: int, dtype: torch.dtype) -> None:
    logits, index, bits = random_case(vocab, dtype)
    before = logits.clone()
    masked = bitmask.masked_logits(logits, index, bits)
    assert masked.dtype == torch.float32 and masked.shape == (3, vocab)
    for row, source in enumerate(index.tolist()):
        for token in range(vocab):
            word = int(bits[row, token // 32]) & 0xFFFFFFFF
            expected = float(logits[source, token]) if word >> token % 32 & 1 else float("-inf")
            assert float(masked[row, token]) == expected
    assert torch.equal(logits, before)


def test_the_cpu_pass_is_the_definition() -> None:
    logits, index, bits = random_case(777, torch.float32)
    expected = bitmask._masked_by_tensor_ops(logits, index, bits)
    assert torch.equal(bitmask.masked_logits(logits, index, bits), expected)


@pytest.mark.parametrize("shape", [(2, 12), (3, 11), (3, 13)])
def test_a_mask_of_another_shape_is_refused(shape: tuple[int, int]) -> None:
    logits, index, _ = random_case(384, torch.float32)
    with pytest.raises(ValueError, match="does not fit"):
        bitmask.masked_logits(logits, index, torch.zeros(shape, dtype=torch.int32))
