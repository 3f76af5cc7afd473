"""What the pieces of prefill take on CUDA, and that they are exact where the MLP is computed in
chunks of rows."""

from __future__ import annotations

import gc

import pytest
import torch

from duograph.runners.batch import PromptWish, SamplingBatch
from duograph.runners.config import GraphConfig
from duograph.runners.layers import block
from duograph.runners.memory_plan import MIB
from duograph.runners.worker import ModelWorker
from duograph.tests.gpu.cuda_workers import PREFILL, cuda_worker
from duograph.tests.graph_checks import replay_faults
from duograph.tests.worker_driver import WorkerDriver

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

TOKENS = 4096
HIDDEN, INNER, LAYERS = 1024, 4096, 10
HIDDEN_BYTES = TOKENS * HIDDEN * 2
INNER_BYTES = 3 * TOKENS * INNER * 2  # gate_up and the activation of all rows


@pytest.fixture
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """1024 rows, whatever they take."""
    monkeypatch.setattr(block, "_CHUNK_BYTES", 0)


def wide_worker(layers: int) -> ModelWorker:
    return cuda_worker(
        GraphConfig(disable_cuda_graph=True, piecewise_cuda_graph_tokens=(TOKENS,)),
        model={
            "hidden_size": HIDDEN,
            "intermediate_size": INNER,
            "num_heads": 16,
            "num_layers": layers,
            "context_length": TOKENS,
        },
        chunked_prefill_size=TOKENS,
        max_total_tokens=8192,
    )


def level_bytes(layers: int) -> int:
    worker = wide_worker(layers)
    taken: int = worker.graph_stats()["prefill"]["sizes"][str(TOKENS)]["nbytes"]
    worker.close()
    return taken


def test_layers_share_their_memory() -> None:
    """What a piece returns is kept until its last reader and no longer."""
    few, many = level_bytes(2), level_bytes(LAYERS)
    # besides what the driver has for each graph
    assert many - few < (LAYERS - 2) * MIB + HIDDEN_BYTES


@pytest.mark.usefixtures("_small_chunks")
def test_chunks_bound_the_memory_of_a_long_step() -> None:
    # residual, branch and attention's output or q, k and v; and one chunk of 1024 rows
    assert level_bytes(LAYERS) < 5 * HIDDEN_BYTES + INNER_BYTES // 4 + (LAYERS + 20) * MIB


@pytest.mark.usefixtures("_small_chunks")
def test_a_level_in_chunks_is_exact() -> None:
    """At 2560 tokens: two chunks and a half, padded and not."""
    worker = cuda_worker(
        GraphConfig(disable_cuda_graph=True, piecewise_cuda_graph_tokens=(2560,)),
        model={"context_length": 2560},
        chunked_prefill_size=2560,
        max_total_tokens=8192,
    )
    driver = WorkerDriver(worker)
    for first_row, tokens in ((1, 2305), (7, 2559), (13, 2560)):
        counts = [tokens // 6 + (index < tokens % 6) for index in range(6)]
        chunks = {
            first_row + index: driver.prompt(count, seed=first_row + index)
            for index, count in enumerate(counts)
        }
        assert replay_faults(worker, driver.extend(chunks)) == []
    assert worker.graph_stats()["recompiles"] == 0


def test_measuring_leaves_nothing_behind_and_predicts_what_captures_take() -> None:
    worker = cuda_worker(
        GraphConfig(),
        model={"hidden_size": HIDDEN, "intermediate_size": INNER, "num_heads": 16},
        chunked_prefill_size=2048,
    )
    worker._measure()  # loads what is loaded once
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    needs = worker._measure()
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() - before < 4 * MIB
    stats = worker.graph_stats()
    for predicted, phase in ((needs.prefill_graphs, "prefill"), (needs.decode_graphs, "decode")):
        sizes = stats[phase]["sizes"]
        taken = sum(size["nbytes"] for size in sizes.values())
        assert taken - 64 * MIB < predicted < taken + (4 * len(sizes) + 32) * MIB


def test_steps_of_all_kinds_trace_nothing_and_prompt_logprobs_run_eagerly() -> None:
    worker = cuda_worker(PREFILL)
    driver = WorkerDriver(worker)
    for row, tokens in enumerate((1, 3, 4, 5, 80, 255, 256, 257), start=1):
        worker.launch(driver.extend({row: driver.prompt(tokens)})).wait()
    worker.launch(driver.decode([1, 2, 3])).wait()
    prompt = driver.prompt(5)
    wish = SamplingBatch(prompt_logprobs={0: PromptWish(0, prompt[1:], 2)})
    worker.launch(driver.extend({9: prompt}, sampling=wish)).wait()
    stats = worker.graph_stats()
    assert stats["recompiles"] == 0
    assert stats["eager_steps"]["prefill"] == {"too_large": 1, "prompt_logprobs": 1}
    assert sum(size["replays"] for size in stats["prefill"]["sizes"].values()) == 7
