"""Packed token bitmasks over logits: which tokens a grammar lets a row take.

Token t of a row is bit t % 32 of word t // 32; a set bit allows it. Knows no grammar, no request
and no batch.
"""

from __future__ import annotations

import numpy as np
import torch

WORD_BITS = 32


def bitmask_words(vocab_size: int) -> int:
    """Words of one row's mask."""
    return -(-vocab_size // WORD_BITS)


def masked_logits(logits: torch.Tensor, index: torch.Tensor, bitmask: torch.Tensor) -> torch.Tensor:
    """The rows of ``index``, with -inf for every token whose bit is not set.

    Args:
        logits: float32 or 16-bit, [n, vocab], rows contiguous. Not changed.
        index: int64 [m], rows of ``logits``.
        bitmask: int32 [m, bitmask_words(vocab)], contiguous, on the same device.

    Returns:
        float32 [m, vocab].

    Raises:
        ValueError: the shapes do not belong together.
    """
    rows, words = bitmask.shape
    if rows != index.shape[0] or words != bitmask_words(logits.shape[1]):
        raise ValueError(
            f"a bitmask of {rows} x {words} words does not fit {index.shape[0]} rows of "
            f"{logits.shape[1]} tokens"
        )
    if logits.is_cuda:
        from duograph.kernels import bitmask_triton

        masked: torch.Tensor = bitmask_triton.masked_logits(logits, index, bitmask)
        return masked
    if logits.device.type == "cpu":
        return _masked_on_cpu(logits, index, bitmask)
    return _masked_by_tensor_ops(logits, index, bitmask)


def _masked_on_cpu(
    logits: torch.Tensor, index: torch.Tensor, bitmask: torch.Tensor
) -> torch.Tensor:
    # numpy unpacks a bit to a byte in one pass; tensor ops would make 32 words of each first
    packed = bitmask.numpy().view(np.uint8)
    bits = np.unpackbits(packed, axis=1, count=logits.shape[1], bitorder="little")
    banned = torch.from_numpy(bits == 0)
    return logits[index].float().masked_fill_(banned, float("-inf"))


def _masked_by_tensor_ops(
    logits: torch.Tensor, index: torch.Tensor, bitmask: torch.Tensor
) -> torch.Tensor:
    """The definition, which the two others are tested against."""
    shifts = torch.arange(WORD_BITS, dtype=torch.int32, device=bitmask.device)
    bits = (bitmask.unsqueeze(2) >> shifts) & 1
    allowed = bits.flatten(1)[:, : logits.shape[1]].bool()
    return logits[index].float().masked_fill(~allowed, float("-inf"))
