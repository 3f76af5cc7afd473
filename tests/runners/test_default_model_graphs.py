"""The real default model through both runners on recorded graphs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from duograph.runners.config import GraphConfig, RunnerConfig
from duograph.runners.model_config import ModelConfig
from duograph.runners.models.loader import load_model
from duograph.runners.worker import ModelWorker
from duograph.tests.graph_checks import replay_and_eager, same
from duograph.tests.worker_driver import GREEDY, WorkerDriver

pytestmark = pytest.mark.model

# "The capital of France is", encoded by the model's tokenizer
PROMPT = [504, 3575, 282, 4649, 314]
PARIS = 7042  # " Paris"


@pytest.fixture(scope="module")
def worker(default_model_folder: Path) -> ModelWorker:
    graph = GraphConfig(cuda_graph_bs=(1, 4), piecewise_cuda_graph_tokens=(16, 64))
    config = RunnerConfig(
        model_path=str(default_model_folder),
        max_running_requests=4,
        chunked_prefill_size=64,
        max_total_tokens=2048,
        graph=graph,
    )
    model_config = ModelConfig.from_folder(default_model_folder)
    device = torch.device("cpu")
    worker = ModelWorker(config, model_config, load_model(config, model_config, device), device)
    worker.plan_memory()
    worker.build_runners()
    worker.capture(lambda phase, done, total: None)
    return worker


def test_thirty_layers_become_thirty_one_pieces(worker: ModelWorker) -> None:
    stats = worker.graph_stats()
    assert stats["prefill"]["pieces"] == 31
    assert list(stats["prefill"]["sizes"]) == ["16", "64"]
    assert list(stats["decode"]["sizes"]) == ["1", "4"]


def test_replays_are_bit_equal_to_eager(worker: ModelWorker) -> None:
    driver = WorkerDriver(worker)
    driver.start({1: 9, 2: 30, 3: 17})
    for rows in ([2], [1, 2, 3]):
        assert same(*replay_and_eager(worker, driver.decode(rows)))
    for tokens in (15, 17, 64):
        assert same(*replay_and_eager(worker, driver.extend({1: driver.prompt(tokens, seed=5)})))


def test_it_knows_the_capital_of_france(worker: ModelWorker) -> None:
    driver = WorkerDriver(worker)
    batch = driver.extend({1: PROMPT}, params={1: GREEDY})
    assert worker.launch(batch).wait().tokens == [PARIS]
    assert worker.graph_stats()["eager_steps"]["prefill"] == {}
