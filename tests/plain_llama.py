"""A Llama-family forward in the plainest torch, as the reference of the fast one: one sequence, no
cache, float32. With ``rounded`` every result that the fast one keeps in bfloat16 is rounded to
it, which shows how far rounding alone moves the logits.

Shares nothing with the layers and kernels under test but the rotary table, which
tests/runners compares with transformers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from duograph.runners.layers.rotary import cos_sin_cache
from duograph.runners.layers.weights import model_weight_slots
from duograph.runners.model_config import ModelConfig
from duograph.runners.models.llama import CausalLM

CPU = torch.device("cpu")


class PlainLlama:
    def __init__(self, config: ModelConfig, weights: Mapping[str, torch.Tensor]) -> None:
        """``weights`` by checkpoint name, of any float type."""
        self._config = config
        self._weights = {name: tensor.float().cpu() for name, tensor in weights.items()}
        self._cos_sin = cos_sin_cache(
            config.rope, head_dim=config.head_dim, context_length=config.context_length, device=CPU
        )

    @classmethod
    def of(cls, model: CausalLM) -> PlainLlama:
        """With the weights of ``model``, which may be on any device."""
        slots = model_weight_slots(model)
        return cls(model.config, {name: slot.target for name, slot in slots.items()})

    @torch.no_grad()
    def logits(self, ids: list[int], *, rounded: bool = False) -> torch.Tensor:
        """float32 [len(ids), vocab]: what follows each token."""
        forward = _Forward(self._config, self._weights, self._cos_sin[: len(ids)], rounded)
        return forward.run(torch.tensor(ids))


class _Forward:
    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, torch.Tensor],
        cos_sin: torch.Tensor,
        rounded: bool,
    ) -> None:
        self.config = config
        self.weights = weights
        self.cos, self.sin = cos_sin.unsqueeze(1).chunk(2, dim=-1)
        self.rounded = rounded

    def run(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.weights["model.embed_tokens.weight"][ids]
        for index in range(self.config.num_layers):
            layer = f"model.layers.{index}."
            normed = self.norm(x, layer + "input_layernorm")
            x = self.keep(x + self.attention(normed, layer + "self_attn."))
            normed = self.norm(x, layer + "post_attention_layernorm")
            x = self.keep(x + self.mlp(normed, layer + "mlp."))
        head = "model.embed_tokens" if self.config.tie_word_embeddings else "lm_head"
        return self.linear(self.norm(x, "model.norm"), head)

    def keep(self, x: torch.Tensor) -> torch.Tensor:
        """What the fast forward stores."""
        return x.bfloat16().float() if self.rounded else x

    def linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return self.keep(
            F.linear(x, self.weights[name + ".weight"], self.weights.get(name + ".bias"))
        )

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        scale = (x.square().mean(-1, keepdim=True) + self.config.rms_eps).rsqrt()
        return self.keep(x * scale * self.weights[name + ".weight"])

    def mlp(self, x: torch.Tensor, name: str) -> torch.Tensor:
        gate = self.keep(F.silu(self.linear(x, name + "gate_proj")))
        return self.linear(self.keep(gate * self.linear(x, name + "up_proj")), name + "down_proj")

    def attention(self, x: torch.Tensor, name: str) -> torch.Tensor:
        tokens, config = x.shape[0], self.config
        q = self.heads(x, name, "q", config.num_heads)
        k = self.heads(x, name, "k", config.num_kv_heads)
        v = self.linear(x, name + "v_proj").view(tokens, config.num_kv_heads, config.head_dim)
        group = config.num_heads // config.num_kv_heads
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(config.head_dim)
        future = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
        weights = self.keep(scores.masked_fill(future, -math.inf).softmax(-1))
        attended = self.keep(torch.einsum("hqk,khd->qhd", weights, v))
        return self.linear(attended.flatten(1), name + "o_proj")

    def heads(self, x: torch.Tensor, name: str, which: str, count: int) -> torch.Tensor:
        """Rotated queries or keys, [T, heads, dim]."""
        projected = self.linear(x, f"{name}{which}_proj").view(-1, count, self.config.head_dim)
        if self.config.qk_norm:
            projected = self.norm(projected, f"{name}{which}_norm")
        first, second = projected.chunk(2, dim=-1)
        rotated = (first * self.cos - second * self.sin, second * self.cos + first * self.sin)
        return self.keep(torch.cat(rotated, -1))


@dataclass(frozen=True, slots=True)
class RoundingBound:
    """How far bfloat16 logits may lie from float32 ones of the same weights.

    The distance is the sum of many roundings, hence close to normal with a deviation that
    depends on model and tokens. ``rms`` measures it there: of ``PlainLlama`` with and without
    rounding. Kernels round at the same places or at fewer, but sum in another order: their
    distance is another draw with this deviation or less.
    """

    rms: float

    @classmethod
    def measure(cls, exact: torch.Tensor, rounded: torch.Tensor) -> RoundingBound:
        return cls(float((rounded - exact).square().mean().sqrt()))

    def largest(self, n: int) -> float:
        """Of ``n`` distances. For a deviation s the largest of n stays below
        s (sqrt(2 ln n) + t) but for a chance of exp(-t sqrt(2 ln n) - t^2 / 2); here t = 2, which
        leaves one in 10,000 from n = 100 on."""
        return self.rms * (math.sqrt(2 * math.log(n)) + 2)

    def check(self, logits: torch.Tensor, exact: torch.Tensor) -> None:
        """Raises AssertionError if ``logits`` are farther from ``exact`` than rounding explains.

        The root of the mean square may be twice the measured one, since few tokens were
        measured and a rounding that a kernel spares may have cancelled another.
        """
        error = logits.float().cpu() - exact
        rms, largest = float(error.square().mean().sqrt()), float(error.abs().max())
        assert rms <= 2 * self.rms, f"rms {rms:.4f}, rounding gives {self.rms:.4f}"
        limit = 2 * self.largest(error.numel())
        assert largest <= limit, f"largest {largest:.4f} of {error.numel()}, limit {limit:.4f}"
