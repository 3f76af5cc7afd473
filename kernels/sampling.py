"""Logits to tokens on tensors: filters, seeded draws, penalties, bias and log-probabilities.

A draw needs no generator: the noise of a token is an integer hash of (seed, position, token
id), so a request's text depends on its own seed and logits alone, whatever else is in the batch
and whether the step was a graph replay. Gumbel-max (Gumbel 1954): argmax(logits / temperature +
noise) has exactly the softmax distribution. No function here waits for the device or asks the
host for a value. Knows no request and no batch object.
"""

from __future__ import annotations

import torch

GREEDY_EPSILON = 1e-5  # a temperature below this means argmax

_NEGATIVE_INFINITY = float("-inf")
# splitmix64 (Steele, Lea, Flood 2014) for the row key, lowbias32 (Wellons 2018) for the tokens.
# Products wrap around in two's complement on CPU and CUDA alike; constants are written signed.
_GOLDEN_64 = 0x9E3779B97F4A7C15 - 2**64
_MIX_64_A = 0xBF58476D1CE4E5B9 - 2**64
_MIX_64_B = 0x94D049BB133111EB - 2**64
_GOLDEN_32 = 0x9E3779B9 - 2**32
_MIX_32_A = 0x21F0AAAD
_MIX_32_B = 0x735A2D97


def sample(
    logits: torch.Tensor,
    *,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seed: torch.Tensor,
    position: torch.Tensor,
    filtered: bool,
    rows: torch.Tensor | None = None,
    next_tokens: torch.Tensor | None = None,
) -> torch.Tensor:
    """One token per row.

    Rows with temperature below ``GREEDY_EPSILON`` take the argmax (the lowest id of equal
    ones) and look at nothing else. For the others the order is: temperature, then top-k, then
    top-p over what top-k left, then min-p relative to the most likely token, then the draw.

    Args:
        logits: float32, on CUDA also 16-bit, [n, vocab]; -inf bans a token. Not changed.
            Arithmetic is in float32 whatever they are.
        temperature, top_p, min_p: float32 [n]. top_p 1 and min_p 0 mean off.
        top_k: integer [n]; 0 or less means off.
        seed: int64 [n], all 64 bits count.
        position: integer [n], position the drawn token will have; the counter of the stream.
        filtered: False promises that no row has top-k, top-p or min-p, and skips their sort.
        rows: int64 [n]. If given, temperature to seed are tables, and those of logits row i
            are in table row ``rows[i]``.
        next_tokens: int64 table; the token of logits row i is left in its row ``rows[i]``, but
            row 0 is left 0, as many padding rows may share it. Needs ``rows``.

    Returns:
        int64 [n].
    """
    if logits.is_cuda:
        from duograph.kernels import sampling_triton

        drawn: torch.Tensor = sampling_triton.sample(
            logits,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            seed=seed,
            position=position,
            filtered=filtered,
            rows=rows,
            next_tokens=next_tokens,
        )
        return drawn
    options = (temperature, top_k, top_p, min_p, seed)
    if rows is not None:
        options = tuple(table[rows] for table in options)  # type: ignore[assignment]
    if logits.device.type == "cpu":
        from duograph.kernels.sampling_cpu import sample_on_cpu

        tokens = sample_on_cpu(logits, *options, position.long(), filtered)
    else:
        tokens = _sample_by_tensor_ops(logits, *options, position.long(), filtered)
    if next_tokens is not None:
        assert rows is not None, "next_tokens is a table by rows"
        next_tokens.scatter_(0, rows, tokens)
        next_tokens[:1].zero_()
    return tokens


def _sample_by_tensor_ops(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seed: torch.Tensor,
    position: torch.Tensor,
    filtered: bool,
) -> torch.Tensor:
    greedy = (temperature < GREEDY_EPSILON).unsqueeze(1)
    scaled = logits / torch.where(greedy, 1.0, temperature.unsqueeze(1))
    if filtered:
        kept = filter_logits(scaled, top_k=top_k, top_p=top_p, min_p=min_p)
        scaled = torch.where(greedy, scaled, kept)
    tokens = torch.arange(logits.shape[1], dtype=torch.int32, device=logits.device)
    noise = gumbel_noise(seed, position, tokens.unsqueeze(0))
    return scaled.add_(noise.masked_fill_(greedy, 0.0)).argmax(dim=-1)


def filter_logits(
    logits: torch.Tensor, *, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    """A new tensor with -inf wherever top-k, then top-p, then min-p drops a token; see
    ``sample``.

    Of equal logits at a boundary the lower id stays. The most likely token always stays, and a
    row without any filter comes back exactly as it was.
    """
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    probs = after_top_k(ordered, top_k).softmax(dim=-1)
    dropped = dropped_by_rank(probs, top_k, top_p, min_p)
    return logits.masked_fill(
        torch.zeros_like(dropped).scatter_(1, order, dropped), _NEGATIVE_INFINITY
    )


def after_top_k(ordered: torch.Tensor, top_k: torch.Tensor) -> torch.Tensor:
    """``ordered`` [n, m], best first, with -inf from rank ``top_k`` on."""
    rank = torch.arange(ordered.shape[1], device=ordered.device)
    beyond = (top_k > 0).unsqueeze(1) & (rank >= top_k.unsqueeze(1))
    return ordered.masked_fill(beyond, _NEGATIVE_INFINITY)


def dropped_by_rank(
    probs: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    """bool [n, m]: which ranks the filters drop, given the probabilities by rank after top-k.
    What is dropped is always a tail."""
    rank = torch.arange(probs.shape[1], device=probs.device)
    dropped = (top_k > 0).unsqueeze(1) & (rank >= top_k.unsqueeze(1))
    before = probs.cumsum(dim=-1) - probs  # mass of the more likely tokens
    # top_p 1 is tested by itself: rounding may carry the sum past 1 before the last token.
    dropped |= (top_p < 1.0).unsqueeze(1) & (before >= top_p.unsqueeze(1))
    dropped |= probs < min_p.unsqueeze(1) * probs[:, :1]
    dropped[:, 0] = False
    return dropped


def gumbel_noise(seed: torch.Tensor, position: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """float32 [n, m], standard Gumbel, finite, for int32 ``tokens`` [n, m] or [1, m]; ``seed``
    and ``position`` int64 [n].

    -log(-log(1 - u)) with u in (0, 1): the small u, which are exact in float32, are the large
    noise, so that the tail that decides between unlikely tokens has the finest steps.
    """
    bits = random_bits(seed, position, tokens)
    uniform = (bits.to(torch.float32) + (0.5 + 2.0**31)).mul_(2.0**-32)
    # Float32 rounds the largest ones to 1, whose noise would be -inf.
    uniform = uniform.clamp_(min=2.0**-33, max=1.0 - 2.0**-24)
    return uniform.neg_().log1p_().neg_().log_().neg_()


def random_bits(seed: torch.Tensor, position: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """int32 [n, m]: a hash of (seed, position, token id), arguments as in ``gumbel_noise``.
    Integer arithmetic only, so CPU and CUDA give the same bits."""
    key = _mix_64(_mix_64(seed) + position * _GOLDEN_64)
    low = key.to(torch.int32).unsqueeze(1)  # conversion keeps the low 32 bits
    high = (key >> 32).to(torch.int32).unsqueeze(1)
    bits = tokens * _GOLDEN_32 + low
    bits.bitwise_xor_(_shift_right_32(bits, 16)).mul_(_MIX_32_A)
    # The second half of the key enters between the rounds: a shifted first half alone would
    # give two requests the same noise for shifted token ids.
    bits.bitwise_xor_(high)
    bits.bitwise_xor_(_shift_right_32(bits, 15)).mul_(_MIX_32_B)
    return bits.bitwise_xor_(_shift_right_32(bits, 15))


def _mix_64(x: torch.Tensor) -> torch.Tensor:
    x = x + _GOLDEN_64
    x = (x ^ _shift_right_64(x, 30)) * _MIX_64_A
    x = (x ^ _shift_right_64(x, 27)) * _MIX_64_B
    return x ^ _shift_right_64(x, 31)


def _shift_right_32(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift: torch's is arithmetic, so the copies of the sign are masked off."""
    return (x >> bits).bitwise_and_((1 << (32 - bits)) - 1)


def _shift_right_64(x: torch.Tensor, bits: int) -> torch.Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def apply_penalties(
    logits: torch.Tensor,
    *,
    output_counts: torch.Tensor,
    in_prompt: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
    repetition: torch.Tensor,
) -> torch.Tensor:
    """Penalised logits, a new tensor.

    Repetition (Keskar et al. 2019) first: logits of tokens in prompt or output are divided by
    the factor if positive and multiplied if negative. Then, on tokens of the output alone,
    OpenAI's: minus frequency times their count, minus presence once.

    Args:
        logits: float32 [n, vocab].
        output_counts: integer [n, vocab], how often each token was generated.
        in_prompt: bool [n, vocab].
        presence, frequency, repetition: float32 [n]; 0, 0 and 1 mean off.
    """
    generated = output_counts > 0
    factor = repetition.unsqueeze(1)
    repeated = torch.where(logits > 0, logits / factor, logits * factor)
    penalised = torch.where(generated | in_prompt, repeated, logits)
    penalised = penalised - frequency.unsqueeze(1) * output_counts
    return penalised - presence.unsqueeze(1) * generated


def add_logit_bias(
    logits: torch.Tensor, rows: torch.Tensor, tokens: torch.Tensor, bias: torch.Tensor
) -> torch.Tensor:
    """Adds ``bias[i]`` to ``logits[rows[i], tokens[i]]`` in place, -inf to ban a token; a
    place named twice gets both. rows, tokens: int64 [m]; bias: float32 [m]. Returns logits."""
    return logits.index_put_((rows, tokens), bias, accumulate=True)


def top_logprobs(
    logits: torch.Tensor, tokens: torch.Tensor, k: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Natural-log probabilities from raw logits, float32 [n, vocab].

    Returns:
        float32 [n] of ``tokens`` (int64 [n]); ids, int64 [n, k], and log-probabilities,
        float32 [n, k], of the k most likely tokens, best first. k may be 0.
    """
    logprobs = logits.log_softmax(dim=-1)
    chosen = logprobs.gather(1, tokens.unsqueeze(1)).squeeze(1)
    best, ids = logprobs.topk(k, dim=-1)
    return chosen, ids, best
