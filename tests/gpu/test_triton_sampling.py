"""The compiled sampling kernels against the torch twin on the CPU, at a real vocabulary."""

from __future__ import annotations

import itertools

import pytest
import torch

from duograph.kernels import sampling

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

VOCAB = 128256
OPTIONS = list(itertools.product((0.0, 0.6, 1.3), (-1, 50), (1.0, 0.9), (0.0, 0.02)))


def make_logits(rows: int, *, rounded: bool, seed: int = 0) -> torch.Tensor:
    """Peaked like a language model's; rounded to bf16, many of them are equal."""
    gen = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, VOCAB, generator=gen) * 2
    logits[:, :300] += torch.randn(rows, 300, generator=gen).abs() * 4
    return logits.bfloat16().float() if rounded else logits


def make_options(device: str) -> dict[str, torch.Tensor]:
    """One row for each entry of OPTIONS."""
    gen = torch.Generator().manual_seed(1)
    columns = torch.tensor(OPTIONS)
    n = len(OPTIONS)
    options = {
        "temperature": columns[:, 0].contiguous(),
        "top_k": columns[:, 1].to(torch.int32),
        "top_p": columns[:, 2].contiguous(),
        "min_p": columns[:, 3].contiguous(),
        "seed": torch.randint(-(2**63), 2**63 - 1, (n,), generator=gen),
        "position": torch.randint(0, 100000, (n,), generator=gen),
    }
    return {name: value.to(device) for name, value in options.items()}


@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("filtered", [False, True])
def test_same_tokens_as_the_twin(rounded: bool, filtered: bool) -> None:
    mine, twin = [], []
    for seed in range(4):
        logits = make_logits(len(OPTIONS), rounded=rounded, seed=seed)
        on_gpu = sampling.sample(logits.cuda(), **make_options("cuda"), filtered=filtered)
        mine.append(on_gpu.cpu())
        twin.append(sampling.sample(logits, **make_options("cpu"), filtered=filtered))
    different = int((torch.cat(mine) != torch.cat(twin)).sum())
    # Two tokens within a rounding of each other are possible, more would be a fault.
    assert different <= 1


@pytest.mark.parametrize("rounded", [False, True])
def test_filters_keep_what_a_float64_sort_keeps(rounded: bool) -> None:
    from duograph.kernels import sampling_filters_triton

    logits = make_logits(len(OPTIONS), rounded=rounded)
    names = ("temperature", "top_k", "top_p", "min_p")
    options = {name: make_options("cpu")[name] for name in names}
    on_gpu = {name: value.cuda() for name, value in options.items()}
    edge, last = sampling_filters_triton.boundaries(logits.cuda(), **on_gpu).cpu()
    bits = logits.view(torch.int32)
    keys = torch.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)
    ids = torch.arange(VOCAB)
    kept = (keys > edge[:, None]) | ((keys == edge[:, None]) & (ids <= last[:, None]))
    heat = options.pop("temperature").double()
    scaled = logits.double() / torch.where(heat == 0, 1.0, heat)[:, None]
    wanted = sampling.filter_logits(scaled, **options) > float("-inf")
    wanted |= (heat == 0)[:, None]
    # Rounding of the mass moves a boundary by at most a few of the tokens that lie there.
    assert int((kept != wanted).sum(1).max()) <= 3


def test_a_row_draws_the_same_alone_and_in_a_batch() -> None:
    logits = make_logits(len(OPTIONS), rounded=True).cuda()
    options = make_options("cuda")
    together = sampling.sample(logits, **options, filtered=True)
    for i in range(len(OPTIONS)):
        one = {name: value[i : i + 1] for name, value in options.items()}
        alone = sampling.sample(logits[i : i + 1], **one, filtered=True)
        assert alone.item() == together[i].item()


@pytest.mark.parametrize("filtered", [False, True])
def test_parameters_in_a_table_and_tokens_left_in_another(filtered: bool) -> None:
    logits = make_logits(len(OPTIONS), rounded=True).cuda()
    options = make_options("cuda")
    wanted = sampling.sample(logits, **options, filtered=filtered)
    order = torch.randperm(len(OPTIONS), device="cuda")
    position = options.pop("position").to(torch.int32)
    next_tokens = torch.full((len(OPTIONS),), -1, device="cuda")
    drawn = sampling.sample(
        logits[order].bfloat16(),
        **options,
        position=position[order],
        filtered=filtered,
        rows=order,
        next_tokens=next_tokens,
    )
    assert torch.equal(drawn, wanted[order])
    wanted[0] = 0  # the row that padding shares
    assert torch.equal(next_tokens, wanted)


def test_plain_rows_draw_the_same_with_and_without_the_filter_pass() -> None:
    logits = make_logits(len(OPTIONS), rounded=False).cuda()
    options = make_options("cuda")
    options["top_k"].fill_(-1)
    options["top_p"].fill_(1.0)
    options["min_p"].fill_(0.0)
    drawn = [sampling.sample(logits, **options, filtered=f) for f in (False, True)]
    assert torch.equal(*drawn)


def test_draws_follow_the_distribution() -> None:
    rows = 20000
    weights = torch.tensor([0.5, 0.25, 0.15, 0.07, 0.03])
    logits = torch.full((1, 1000), float("-inf"))
    logits[0, 100:105] = weights.log()
    fill = {"temperature": 1.0, "top_p": 1.0, "min_p": 0.0}
    options = {name: torch.full((rows,), value, device="cuda") for name, value in fill.items()}
    tokens = sampling.sample(
        logits.cuda().expand(rows, -1),
        **options,
        top_k=torch.full((rows,), -1, device="cuda"),
        seed=torch.full((rows,), 42, device="cuda"),
        position=torch.arange(rows, device="cuda"),
        filtered=False,
    )
    share = torch.bincount(tokens.cpu() - 100, minlength=5) / rows
    torch.testing.assert_close(share, weights, atol=0.015, rtol=0)  # over four sigma


def test_a_row_of_nan_still_gives_a_valid_id() -> None:
    logits = torch.full((1, VOCAB), float("nan"), device="cuda")
    options = {name: value[5:6] for name, value in make_options("cuda").items()}
    for filtered in (False, True):
        assert 0 <= sampling.sample(logits, **options, filtered=filtered).item() < VOCAB


@pytest.mark.parametrize("filtered", [False, True])
def test_replays_in_a_graph(filtered: bool) -> None:
    logits = make_logits(len(OPTIONS), rounded=True).cuda()
    options = make_options("cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        sampling.sample(logits, **options, filtered=filtered)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens = sampling.sample(logits, **options, filtered=filtered)
    for seed in range(3):
        logits.copy_(make_logits(len(OPTIONS), rounded=True, seed=seed))
        options["position"] += 1
        graph.replay()
        assert torch.equal(tokens, sampling.sample(logits, **options, filtered=filtered))
