"""Sampling: distributions, seeds, filters, penalties and log-probabilities."""

from __future__ import annotations

import math

import pytest
import torch

from duograph.kernels import sampling

# 99.99 % point of chi-square with 15 degrees of freedom: seeds are fixed, so this either always
# passes or never.
CHI2_15 = 44.3
DRAWS = 40_000


def draw(logits: torch.Tensor, *, filtered: bool = False, **overrides: object) -> torch.Tensor:
    n = logits.shape[0]
    arguments: dict[str, object] = {
        "temperature": 1.0,
        "top_k": -1,
        "top_p": 1.0,
        "min_p": 0.0,
        "seed": 0,
        "position": torch.arange(n),
    } | overrides
    types = {"top_k": torch.int64, "seed": torch.int64, "position": torch.int64}
    tensors = {
        name: value
        if isinstance(value, torch.Tensor)
        else torch.full((n,), value, dtype=types.get(name, torch.float32))  # type: ignore[call-overload]
        for name, value in arguments.items()
    }
    return sampling.sample(logits, filtered=filtered, **tensors)


def draw_on_tensors(logits: torch.Tensor, **kwargs: object) -> torch.Tensor:
    """The device-independent path, which CUDA takes, run here on the meta-free CPU tensors."""
    n = logits.shape[0]
    top_k = torch.full((n,), int(kwargs.get("top_k", -1)))  # type: ignore[call-overload]
    top_p = torch.full((n,), float(kwargs.get("top_p", 1.0)))  # type: ignore[arg-type]
    min_p = torch.full((n,), float(kwargs.get("min_p", 0.0)))  # type: ignore[arg-type]
    kept = sampling.filter_logits(logits, top_k=top_k, top_p=top_p, min_p=min_p)
    tokens = torch.arange(logits.shape[1], dtype=torch.int32).unsqueeze(0)
    seed = torch.zeros(n, dtype=torch.int64)
    return (kept + sampling.gumbel_noise(seed, torch.arange(n), tokens)).argmax(dim=-1)


def chi_square(tokens: torch.Tensor, probs: torch.Tensor) -> float:
    seen = torch.bincount(tokens, minlength=probs.numel()).double()
    assert seen[probs == 0].sum() == 0, "a token of probability zero was drawn"
    expected = probs[probs > 0].double() * tokens.numel()
    return float(((seen[probs > 0] - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_draws_follow_the_softmax(temperature: float) -> None:
    logits = torch.linspace(-2.0, 2.0, 16)
    tokens = draw(logits.repeat(DRAWS, 1), temperature=temperature)
    assert chi_square(tokens, (logits / temperature).softmax(0)) < CHI2_15


def test_draws_follow_the_softmax_over_seeds_too() -> None:
    logits = torch.linspace(-2.0, 2.0, 16)
    seeds = torch.arange(DRAWS) - DRAWS // 2
    tokens = draw(logits.repeat(DRAWS, 1), seed=seeds, position=5)
    assert chi_square(tokens, logits.softmax(0)) < CHI2_15


@pytest.mark.parametrize(
    "filters",
    [{"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.2}, {"top_k": 9, "top_p": 0.8, "min_p": 0.1}],
    ids=str,
)
def test_filters_cut_the_distribution_and_keep_its_shape(filters: dict[str, float]) -> None:
    logits = torch.linspace(-2.0, 2.0, 16)[torch.randperm(16)]
    kept = naive_filter(logits, **filters)
    tokens = draw(logits.repeat(DRAWS, 1), filtered=True, **filters)
    assert chi_square(tokens, kept) < CHI2_15


def naive_filter(
    logits: torch.Tensor, top_k: float = -1, top_p: float = 1.0, min_p: float = 0.0
) -> torch.Tensor:
    """Probabilities after top-k, top-p and min-p, token by token."""
    probs = logits.double().softmax(0).tolist()
    order = sorted(range(len(probs)), key=lambda i: -probs[i])
    if top_k > 0:
        order = order[: int(top_k)]
    total = sum(probs[i] for i in order)
    kept, mass = [], 0.0
    for i in order:
        if top_p < 1.0 and mass >= top_p:
            break
        if probs[i] / total < min_p * probs[order[0]] / total:
            break
        kept.append(i)
        mass += probs[i] / total
    out = torch.zeros(len(probs))
    out[kept] = torch.tensor([probs[i] for i in kept])
    return out / out.sum()


@pytest.mark.parametrize("vocab", [50, 5000])
@pytest.mark.parametrize(
    "filters",
    [
        {"top_k": 1},
        {"top_k": 40},
        {"top_k": 3000},
        {"top_p": 0.1},
        {"top_p": 0.999},
        {"min_p": 0.05},
        {"top_k": 30, "top_p": 0.9, "min_p": 0.01},
        {"top_p": 1e-6},
        {"min_p": 1.0},
    ],
    ids=str,
)
def test_the_short_way_on_cpu_draws_what_the_full_sort_draws(
    vocab: int, filters: dict[str, float]
) -> None:
    """Flat and peaked rows: the flat ones reach beyond the candidates."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(12, vocab, generator=generator) * torch.linspace(0.1, 8, 12)[:, None]
    assert torch.equal(draw(logits, filtered=True, **filters), draw_on_tensors(logits, **filters))


def test_filter_logits_keeps_exactly_what_the_naive_one_keeps() -> None:
    generator = torch.Generator().manual_seed(2)
    for filters in ({"top_k": 7}, {"top_p": 0.6}, {"min_p": 0.1}, {"top_k": 20, "top_p": 0.5}):
        for row in torch.randn(20, 64, generator=generator) * 2:
            kept = sampling.filter_logits(
                row.unsqueeze(0),
                top_k=torch.tensor([int(filters.get("top_k", -1))]),
                top_p=torch.tensor([filters.get("top_p", 1.0)]),
                min_p=torch.tensor([filters.get("min_p", 0.0)]),
            )[0]
            assert torch.equal(kept.isfinite(), naive_filter(row, **filters) > 0)
            assert torch.equal(kept[kept.isfinite()], row[kept.isfinite()])


def test_greedy_rows_take_the_first_maximum_and_ignore_everything_else() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0], [5.0, 1.0, 5.0, 0.0]])
    for filtered in (False, True):
        tokens = draw(logits, filtered=filtered, temperature=0.0, top_k=1, top_p=0.1, seed=9)
        assert tokens.tolist() == [1, 0]


@pytest.mark.parametrize("filtered", [False, True])
def test_a_row_draws_the_same_alone_and_in_any_batch(filtered: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(9, 2000, generator=generator) * 3
    n = logits.shape[0]
    rows: dict[str, torch.Tensor] = {
        "temperature": torch.tensor([0.0, 0.7, 1.0, 1.3, 0.0, 1.0, 2.0, 0.7, 1.0]),
        "seed": torch.randint(-(2**63), 2**63 - 1, (n,), generator=generator),
        "position": torch.randint(0, 9000, (n,), generator=generator),
    }
    if filtered:  # some rows with, some without
        rows["top_p"] = torch.tensor([0.9, 0.9, 1.0, 0.5, 1.0, 1.0, 0.999, 0.3, 1.0])
        rows["top_k"] = torch.tensor([3, -1, -1, 50, -1, 1900, -1, -1, -1])
    together = draw(logits, filtered=filtered, **rows)
    order = torch.randperm(n, generator=generator)
    shuffled = draw(
        logits[order], filtered=filtered, **{name: row[order] for name, row in rows.items()}
    )
    assert torch.equal(shuffled, together[order])
    for i in range(n):
        alone = draw(
            logits[i : i + 1],
            filtered=filtered,
            **{name: row[i : i + 1] for name, row in rows.items()},
        )
        assert alone.item() == together[i]
    # A row without filters draws the same whether or not the batch has filtered rows.
    plain = draw(
        logits, temperature=rows["temperature"], seed=rows["seed"], position=rows["position"]
    )
    if filtered:
        for i in (2, 4, 8):
            assert together[i] == plain[i]


def test_seeds_that_share_bits_differ() -> None:
    seeds = [0, 1, -1, 2**32, 2**32 - 1, -(2**32), 2**63 - 1, -(2**63)]
    seed = torch.tensor(seeds)
    tokens = torch.arange(4096, dtype=torch.int32).unsqueeze(0)
    bits = sampling.random_bits(seed, torch.full_like(seed, 3), tokens)
    noise = sampling.gumbel_noise(seed, torch.full_like(seed, 3), tokens)
    for i in range(len(seeds)):
        for j in range(i):
            assert (bits[i] == bits[j]).float().mean() < 0.01
            assert torch.corrcoef(noise[[i, j]])[0, 1].abs() < 0.08


def test_bits_are_those_of_the_documented_hash() -> None:
    """Plain Python integers: what any device has to give."""
    mask32, mask64 = 2**32 - 1, 2**64 - 1

    def mix64(x: int) -> int:
        x = (x + 0x9E3779B97F4A7C15) & mask64
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask64
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask64
        return x ^ (x >> 31)

    def bits(seed: int, position: int, token: int) -> int:
        key = mix64((mix64(seed & mask64) + position * 0x9E3779B97F4A7C15) & mask64)
        x = (token * 0x9E3779B9 + (key & mask32)) & mask32
        x = ((x ^ (x >> 16)) * 0x21F0AAAD) & mask32
        x ^= key >> 32
        x = ((x ^ (x >> 15)) * 0x735A2D97) & mask32
        return x ^ (x >> 15)

    cases = [(0, 0, 0), (-1, 5, 49151), (2**40 + 7, 8191, 3), (-(2**63), 1, 151935)]
    for seed, position, token in cases:
        seen = sampling.random_bits(
            torch.tensor([seed]),
            torch.tensor([position]),
            torch.tensor([[token]], dtype=torch.int32),
        )
        assert int(seen) & mask32 == bits(seed, position, token)


def test_noise_is_standard_gumbel_and_finite() -> None:
    tokens = torch.arange(1 << 20, dtype=torch.int32).unsqueeze(0)
    noise = sampling.gumbel_noise(torch.tensor([11]), torch.tensor([4]), tokens)
    assert noise.isfinite().all()
    assert abs(float(noise.mean()) - 0.57722) < 0.006
    assert abs(float(noise.std()) - math.pi / math.sqrt(6)) < 0.006


def test_penalties_match_a_naive_loop() -> None:
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(4, 30, generator=generator)
    counts = torch.randint(0, 3, (4, 30), generator=generator, dtype=torch.int32)
    in_prompt = torch.rand(4, 30, generator=generator) < 0.3
    presence = torch.tensor([0.0, 0.5, -1.0, 2.0])
    frequency = torch.tensor([0.0, -0.3, 0.7, 0.0])
    repetition = torch.tensor([1.0, 1.3, 0.8, 1.0])
    expected = logits.clone()
    for n in range(4):
        for v in range(30):
            value = float(expected[n, v])
            if counts[n, v] > 0 or in_prompt[n, v]:
                factor = float(repetition[n])
                value = value / factor if value > 0 else value * factor
            value -= float(frequency[n]) * int(counts[n, v])
            value -= float(presence[n]) * (int(counts[n, v]) > 0)
            expected[n, v] = value
    before = logits.clone()
    seen = sampling.apply_penalties(
        logits,
        output_counts=counts,
        in_prompt=in_prompt,
        presence=presence,
        frequency=frequency,
        repetition=repetition,
    )
    torch.testing.assert_close(seen, expected)
    assert torch.equal(logits, before)
    assert torch.equal(seen[0], before[0]), "a row without penalties is untouched"


def test_bias_adds_up_and_bans() -> None:
    logits = torch.zeros(2, 5)
    sampling.add_logit_bias(
        logits,
        torch.tensor([0, 0, 1]),
        torch.tensor([3, 3, 2]),
        torch.tensor([1.0, 2.5, float("-inf")]),
    )
    assert logits[0].tolist() == [0, 0, 0, 3.5, 0]
    tokens = draw(logits[1:].repeat(500, 1))
    assert 2 not in tokens.tolist() and len(set(tokens.tolist())) == 4


def test_logprobs_are_those_of_the_softmax() -> None:
    logits = torch.randn(3, 40)
    tokens = torch.tensor([7, 0, 39])
    chosen, ids, best = sampling.top_logprobs(logits, tokens, 4)
    expected = logits.double().softmax(-1).log()
    torch.testing.assert_close(chosen.double(), expected[torch.arange(3), tokens])
    assert torch.equal(ids, expected.topk(4).indices)
    torch.testing.assert_close(best.double(), expected.topk(4).values)
    assert sampling.top_logprobs(logits, tokens, 0)[1].shape == (3, 0)
