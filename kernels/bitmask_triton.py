"""``bitmask.masked_logits`` on CUDA: gather, unpack and mask in one pass over the logits."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 4096


@triton.jit
def _masked_kernel(
    logits: tl.tensor,
    index: tl.tensor,
    bitmask: tl.tensor,
    masked: tl.tensor,
    vocab: tl.tensor,
    words: tl.tensor,
    logits_stride: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    tokens = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = tokens < vocab
    source = tl.load(index + row)
    word = tl.load(bitmask + row * words + tokens // 32, mask=inside, other=0)
    allowed = ((word >> (tokens % 32)) & 1) == 1
    values = tl.load(logits + source * logits_stride + tokens, mask=inside & allowed, other=0.0)
    kept = tl.where(allowed, values.to(tl.float32), float("-inf"))
    tl.store(masked + row * vocab + tokens, kept, mask=inside)


def masked_logits(logits: torch.Tensor, index: torch.Tensor, bitmask: torch.Tensor) -> torch.Tensor:
    """See ``bitmask.masked_logits``."""
    rows, words = bitmask.shape
    vocab = logits.shape[1]
    masked = torch.empty((rows, vocab), dtype=torch.float32, device=logits.device)
    if rows:
        grid = (rows, triton.cdiv(vocab, _BLOCK))
        _masked_kernel[grid](
            logits, index, bitmask, masked, vocab, words, logits.stride(0), BLOCK=_BLOCK
        )
    return masked
