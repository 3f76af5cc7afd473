"""The Llama family: Llama, Mistral, Qwen2 and Qwen3 (dense) in one file.

They differ in two flags of ``ModelConfig``: a bias on the qkv projection (Qwen2) and a norm on
each query and key head (Qwen3). The file reads like the paper; where weights come from and how
a batch is laid out in memory is not known here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import cast

import torch
from torch import nn

from duograph.kernels import fused_linear, packed_linear
from duograph.runners.layers.block import DecoderBlock
from duograph.runners.layers.embedding import LMHead, VocabParallelEmbedding
from duograph.runners.layers.norm import RMSNorm
from duograph.runners.layers.rotary import cos_sin_cache
from duograph.runners.layers.weights import SINGLE, Packable, TPGroup
from duograph.runners.model_config import ModelConfig

Transformer = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""int64 ids [T] and positions [T] to hidden states [T, hidden_size]."""


class LlamaModel(nn.Module):
    """Tokens to hidden states: the part that torch.compile traces."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: torch.dtype,
        device: torch.device,
        tp: TPGroup = SINGLE,
    ) -> None:
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(
            config.vocab_size, config.hidden_size, dtype=dtype, device=device, tp=tp
        )
        self.layers = nn.ModuleList(
            DecoderBlock(config, layer_id, dtype=dtype, device=device, tp=tp)
            for layer_id in range(config.num_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_eps, dtype=dtype, device=device)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """int64 [T], int64 [T] to hidden states [T, hidden_size], normed."""
        first, *rest = cast(Iterable[DecoderBlock], self.layers)
        hidden, residual = self.embed_tokens.normed(input_ids, first.input_layernorm)
        hidden, residual = first.from_normed(hidden, residual, positions)
        for layer in rest:
            hidden, residual = layer(hidden, residual, positions)
        hidden, _ = self.norm.add_(hidden, residual)
        return hidden

    def forward_row(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """As ``forward``, for one token: a decode step at batch 1 is a stream of weights."""
        hidden: torch.Tensor = self.embed_tokens(input_ids)
        for layer in self.layers:
            hidden = cast(DecoderBlock, layer).forward_row(hidden, positions)
        normed: torch.Tensor = self.norm(hidden)
        return normed


class CausalLM(nn.Module):
    """A model and its head.

    Attributes:
        activation_dtype: dtype of hidden states and of the KV pool that suits them best.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: torch.dtype,
        device: torch.device,
        tp: TPGroup = SINGLE,
    ) -> None:
        super().__init__()
        self.config = config
        self.activation_dtype = dtype
        self.model = LlamaModel(config, dtype=dtype, device=device, tp=tp)
        self.lm_head = LMHead(
            config.vocab_size,
            config.hidden_size,
            tied_to=self.model.embed_tokens if config.tie_word_embeddings else None,
            dtype=dtype,
            device=device,
            tp=tp,
        )
        self._fused_rows = fused_linear.BEST_ROWS if self._can_fuse(tp) else 0

    def _can_fuse(self, tp: TPGroup) -> bool:
        config = self.config
        has_bias = config.qkv_bias or config.o_bias or config.mlp_bias
        weight = self.model.embed_tokens.weight
        return tp.size == 1 and not has_bias and fused_linear.is_available(weight)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, hidden_size] to [n, vocab_size], float32 or (on CUDA) the weights' dtype."""
        logits: torch.Tensor = self.lm_head(hidden)
        return logits

    def decode_forward(self, rows: int) -> Transformer:
        """What runs a decode step of ``rows`` rows fastest; graphs and the eager runner alike
        ask here, so that they stay equal bit for bit."""
        return self.model.forward_row if rows <= self._fused_rows else self.model

    def weight_bytes(self) -> int:
        """Bytes of all weights on the device, packed ones included."""
        plain = {parameter.data_ptr(): parameter.nbytes for parameter in self.parameters()}
        layers = [module for module in self.modules() if isinstance(module, Packable)]
        packed = sum(layer.packed.nbytes for layer in layers if layer.packed is not None)
        return sum(plain.values()) + packed

    def cos_sin(self, device: torch.device) -> torch.Tensor:
        """float32 [context_length, head_dim], the rotary table of this model."""
        return cos_sin_cache(
            self.config.rope,
            head_dim=self.config.head_dim,
            context_length=self.config.context_length,
            device=device,
        )

    def pack_for_cpu(self) -> bool:
        """Changes 16-bit linear layers on CPU to the packed kernel, and activations to float32.

        All layers or none, since the activations between them have one dtype. Call it once,
        after loading. Returns whether it did: not on other devices, not in float32, not where
        torch lacks the kernel, and not if a weight exceeds float16's range.
        """
        parameter = next(self.parameters())
        layers = [module for module in self.modules() if isinstance(module, Packable)]
        if (
            parameter.device.type != "cpu"
            or self.activation_dtype == torch.float32
            or not packed_linear.is_available()
            or not all(layer.can_pack() for layer in layers)
        ):
            return False
        # Packing one weight uses one core: 2.5 s in all for 135M parameters.
        with ThreadPoolExecutor(torch.get_num_threads()) as pool:
            for done in [pool.submit(layer.pack) for layer in layers]:
                done.result()
        for module in self.modules():
            if isinstance(module, RMSNorm):
                module.float()
        self.model.embed_tokens.output_dtype = torch.float32
        self.activation_dtype = torch.float32
        return True


def create_model(
    config: ModelConfig, *, dtype: torch.dtype, device: torch.device, tp: TPGroup = SINGLE
) -> CausalLM:
    """The model with uninitialised weights.

    Raises:
        ValueError: heads or layers do not divide over the tensor-parallel ranks.
    """
    return CausalLM(config, dtype=dtype, device=device, tp=tp)
