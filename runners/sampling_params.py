"""Sampling parameters of one request, as they travel from the HTTP schema to the sampler.

Torch-free: the frontends and the scheduler read it too. Ranges are checked twice, at HTTP and
again by ``validate`` at the scheduler's door.
"""

from __future__ import annotations

import math

import msgspec

GREEDY_EPSILON = 1e-5  # a temperature below this means argmax


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """Defaults are those of the OpenAI API. ``top_k`` -1 means off."""

    max_new_tokens: int = 16
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    seed: int = 0  # always set: the frontend draws one when the client gave none
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = msgspec.field(default_factory=dict)
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None  # None = none; k = the sampled token's and the k best
    prompt_logprobs: int | None = None  # likewise, of the prompt's own tokens
    prompt_logprobs_start: int = 1  # the first token to tell of; token 0 follows nothing

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_EPSILON

    @property
    def needs_filter(self) -> bool:
        """True if top-k, top-p or min-p narrows the distribution that is sampled from."""
        return not self.is_greedy and (self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0)

    @property
    def needs_penalty(self) -> bool:
        return (
            self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or self.repetition_penalty != 1.0
        )

    def validate(self, vocab_size: int) -> None:
        """Raises ValueError naming the first field that is out of range."""
        bounds: tuple[tuple[str, float, float, float], ...] = (
            ("temperature", self.temperature, 0.0, 2.0),
            ("top_p", self.top_p, math.nextafter(0.0, 1.0), 1.0),
            ("min_p", self.min_p, 0.0, 1.0),
            ("presence_penalty", self.presence_penalty, -2.0, 2.0),
            ("frequency_penalty", self.frequency_penalty, -2.0, 2.0),
            ("repetition_penalty", self.repetition_penalty, math.nextafter(0.0, 1.0), 2.0),
            ("max_new_tokens", self.max_new_tokens, 0, 2**31),
            ("min_new_tokens", self.min_new_tokens, 0, self.max_new_tokens),
            ("seed", self.seed, -(2**63), 2**63 - 1),
            ("logprobs", self.logprobs or 0, 0, 20),
            ("prompt_logprobs", self.prompt_logprobs or 0, 0, 20),
            ("prompt_logprobs_start", self.prompt_logprobs_start, 1, 2**31),
        )
        for name, value, low, high in bounds:
            if not (low <= value <= high):  # NaN fails this too
                raise ValueError(f"{name} must be in [{low}, {high}], got {value}")
        if self.top_k != -1 and not 1 <= self.top_k <= vocab_size:
            raise ValueError(f"top_k must be -1 or in [1, {vocab_size}], got {self.top_k}")
        for token in self.stop_token_ids:
            if not 0 <= token < vocab_size:
                raise ValueError(f"stop_token_ids: {token} is not in [0, {vocab_size})")
        for token, bias in self.logit_bias.items():
            if not 0 <= token < vocab_size:
                raise ValueError(f"logit_bias: token {token} is not in [0, {vocab_size})")
            if not -100.0 <= bias <= 100.0:
                raise ValueError(f"logit_bias: {bias} is not in [-100, 100]")
