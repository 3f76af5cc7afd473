"""Every size that a server with this card's defaults captures: a replay gives eager's bits, the
same bits again, whatever the padding reads, and writes no slot but the batch's and the dummy."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from duograph.runners.buckets import get_batch_sizes_to_capture, get_token_levels_to_capture
from duograph.runners.config import GraphConfig
from duograph.runners.worker import ModelWorker
from duograph.tests.gpu.cuda_workers import GRAPH_BACKENDS, cuda_worker
from duograph.tests.graph_checks import (
    decode_runner,
    fill_pool,
    on_stream,
    prefill_runner,
    replay_faults,
    runners_of,
)
from duograph.tests.worker_driver import WorkerDriver

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
MAX_BS = 256
MAX_TOKENS = 8192


@pytest.fixture(scope="module", params=GRAPH_BACKENDS)
def worker(request: pytest.FixtureRequest) -> ModelWorker:
    return cuda_worker(
        GraphConfig(),
        model={"context_length": 2 * MAX_TOKENS},
        attention_backend=request.param,
        max_running_requests=MAX_BS,
        chunked_prefill_size=MAX_TOKENS,
        max_total_tokens=50_000,
        page_size=64,
    )


@pytest.fixture(scope="module")
def narrow_worker() -> ModelWorker:
    """Heads of 128 with a norm of their own, as many of queries as of keys, small pages, and levels
    that no page fits."""
    return cuda_worker(
        GraphConfig(piecewise_cuda_graph_tokens=(7, 50, 128), cuda_graph_bs=(1, 3, 5, 20)),
        model={"num_heads": 2, "head_dim": 128, "qk_norm": True},
    )


def decode_faults(worker: ModelWorker, lengths: dict[int, int]) -> dict[int, list[str]]:
    """By batch size: each captured one, and the ones beside it that are padded to the next."""
    fill_pool(worker, lambda tensor: tensor.fill_(float("nan")))
    driver = WorkerDriver(worker)
    prompts = {row: driver.prompt(length, seed=row) for row, length in lengths.items()}
    worker.launch(driver.extend(prompts)).wait()
    captured = decode_runner(worker).sizes
    sizes = sorted({n for size in captured for n in (size - 1, size, size + 1)} & set(lengths))
    faults = {
        size: replay_faults(worker, driver.decode(list(range(size, 0, -1)))) for size in sizes
    }
    assert len(faults) > len(captured)
    return {size: found for size, found in faults.items() if found}


def level_points(levels: tuple[int, ...]) -> Iterator[int]:
    points = {1} | {n for level in levels for n in (level - 1, level, level + 1)}
    return (n for n in sorted(points) if 1 <= n <= levels[-1])


def extend_faults(worker: ModelWorker) -> dict[int, list[str]]:
    """By number of tokens, in two sequences: one goes on, one is new."""
    found = {}
    for tokens in level_points(prefill_runner(worker).sizes):
        fill_pool(worker, lambda tensor: tensor.fill_(float("nan")))
        driver = WorkerDriver(worker)
        driver.start({1: 21})
        second = tokens // 3
        chunks = {1: driver.prompt(tokens - second, seed=7)}
        if second:
            chunks[2] = driver.prompt(second, seed=8)
        faults = replay_faults(worker, driver.extend(chunks))
        if faults:
            found[tokens] = faults
    return found


def test_the_lists_are_those_of_the_defaults(worker: ModelWorker) -> None:
    sizes, levels = decode_runner(worker).sizes, prefill_runner(worker).sizes
    assert sizes == get_batch_sizes_to_capture(MAX_BS, device_type="cuda")
    assert levels == get_token_levels_to_capture(MAX_TOKENS, device_type="cuda")
    assert (len(sizes), len(levels)) == (36, 58)


def test_decode_replays_are_exact_at_every_size(worker: ModelWorker) -> None:
    """Short sequences, and four that attention splits."""
    lengths = {row: 1 + 7 * row % 23 for row in range(1, MAX_BS + 1)}
    lengths |= {1: 700, 2: 300, 3: 129, 100: 900}
    assert decode_faults(worker, lengths) == {}


def test_pieces_are_exact_at_every_level(worker: ModelWorker) -> None:
    assert extend_faults(worker) == {}


def test_both_phases_are_exact_in_another_shape(narrow_worker: ModelWorker) -> None:
    assert decode_faults(narrow_worker, {row: 5 * row for row in range(1, 21)}) == {}
    assert extend_faults(narrow_worker) == {}


def test_one_token_above_the_largest_level_is_eager_and_right(worker: ModelWorker) -> None:
    """What the step computes is what two steps that fit compute, up to rounding."""
    runners = runners_of(worker)
    driver = WorkerDriver(worker)
    prompt = driver.prompt(MAX_TOKENS + 1)
    whole = driver.extend({1: prompt})
    assert runners.pick_runner(whole) is runners.eager
    before = worker.graph_stats()["eager_steps"]["prefill"]["too_large"]
    worker.launch(whole).wait()
    assert worker.graph_stats()["eager_steps"]["prefill"]["too_large"] == before + 1
    worker.launch(driver.extend({2: prompt[:MAX_TOKENS]})).wait()
    last = driver.extend({2: prompt[MAX_TOKENS:]})
    assert runners.pick_runner(last) is runners.prefill
    worker.launch(last).wait()
    pool = runners.parts.kv_pool
    with on_stream(worker):
        keys = [written_keys(worker, row, MAX_TOKENS + 1) for row in (1, 2)]
    assert len(keys[0]) == len(pool.k)
    for one, two in zip(*keys, strict=True):
        error = (one.float() - two.float()).norm() / two.float().norm()
        assert error < 2**-7  # a unit in the last place of bfloat16: only GEMM shapes differ


def written_keys(worker: ModelWorker, row: int, length: int) -> list[torch.Tensor]:
    """Of every layer, [length, heads, dim], through the page table."""
    parts = runners_of(worker).parts
    page_size = parts.kv_pool.page_size
    position = torch.arange(length, device=worker.device)
    pages = parts.table.page_table[row, position // page_size].long()
    return [keys[pages * page_size + position % page_size] for keys in parts.kv_pool.k]
