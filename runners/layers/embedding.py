"""Token embedding and language-model head, both split over the vocabulary.

With tied weights the head computes with the embedding's table and has no tensor of its own in
the checkpoint. Knows no tokenizer.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn

from duograph.kernels import fused, fused_linear
from duograph.kernels import packed_linear as packed_kernel
from duograph.runners.layers.norm import RMSNorm
from duograph.runners.layers.weights import SINGLE, TPGroup, WeightSlot


class VocabParallelEmbedding(nn.Module):
    """Rows of a table [vocab_size, hidden_size], one per token.

    ``output_dtype`` is what the first layer gets; it differs from the table's type only when
    the linear layers were packed.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        tp: TPGroup = SINGLE,
    ) -> None:
        super().__init__()
        self.tp = tp
        self.weight = nn.Parameter(
            torch.empty(
                tp.shard(vocab_size, "vocab_size"), hidden_size, dtype=dtype, device=device
            ),
            requires_grad=False,
        )
        self.output_dtype = dtype

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """int64 [num_tokens] to [num_tokens, hidden_size]."""
        return fused.embedding(input_ids, self.weight).to(self.output_dtype)

    def normed(self, input_ids: torch.Tensor, norm: RMSNorm) -> tuple[torch.Tensor, torch.Tensor]:
        """``norm`` of the result of ``forward``, and that result. The norm's weights are of
        ``output_dtype``."""
        return fused.embed_rms_norm(input_ids, self.weight, norm.weight, norm.eps)

    def weight_slots(self, name: str) -> Iterator[tuple[str, WeightSlot]]:
        yield f"{name}.weight", WeightSlot(self.weight, 0, self.tp)


class LMHead(nn.Module):
    """Hidden states to logits: float32 on CPU, on CUDA what the GEMM rounds to. Copies of a whole
    vocabulary cost more there than the sampler's conversions while it reads."""

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        *,
        tied_to: VocabParallelEmbedding | None,
        dtype: torch.dtype,
        device: torch.device,
        tp: TPGroup = SINGLE,
    ) -> None:
        super().__init__()
        self.tp = tp
        self.is_tied = tied_to is not None
        self.vocab_size = vocab_size
        self.weight: nn.Parameter | None
        if tied_to is not None:
            self.weight = tied_to.weight
        else:
            rows = tp.shard(vocab_size, "vocab_size")
            table = torch.empty(rows, hidden_size, dtype=dtype, device=device)
            self.weight = nn.Parameter(table, requires_grad=False)
        self.packed: packed_kernel.PackedWeight | None = None
        self.handle = -1

    def can_pack(self) -> bool:
        return self.weight is not None and packed_kernel.fits_float16(self.weight)

    def pack(self) -> None:
        """The table of a tied embedding stays beside the packed copy: rows of the packed one
        cannot be looked up."""
        assert self.weight is not None, "packed twice"
        self.packed = packed_kernel.PackedWeight(self.weight, None)
        self.handle = self.packed.handle
        self.weight = None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, hidden_size] to [n, vocab_size]."""
        if self.weight is None:
            return packed_kernel.packed_linear(hidden, self.handle, self.vocab_size)
        if hidden.shape[0] <= fused_linear.BEST_ROWS and fused_linear.is_available(self.weight):
            return fused_linear.fused_linear(hidden, self.weight)
        logits = F.linear(hidden, self.weight)
        return logits if logits.is_cuda else logits.float()

    def weight_slots(self, name: str) -> Iterator[tuple[str, WeightSlot]]:
        if not self.is_tied:
            assert self.weight is not None, "weights are loaded before they are packed"
            yield f"{name}.weight", WeightSlot(self.weight, 0, self.tp)
