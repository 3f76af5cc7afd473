"""Prompt log-probabilities of a worker against transformers' own, in float32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from duograph.runners.batch import PromptWish, SamplingBatch
from duograph.runners.config import GraphConfig, RunnerConfig
from duograph.runners.model_config import ModelConfig
from duograph.runners.models.loader import load_model
from duograph.runners.prompt_logprobs import score_prompt
from duograph.runners.worker import ModelWorker
from duograph.tests.runners.tiny_models import save_reference
from duograph.tests.worker_driver import WorkerDriver

CPU = torch.device("cpu")
K = 4


def make_worker(folder: Path) -> ModelWorker:
    no_graphs = GraphConfig(disable_cuda_graph=True, disable_piecewise_cuda_graph=True)
    config = RunnerConfig(
        model_path=str(folder), dtype="float32", device="cpu", page_size=4,
        max_running_requests=4, chunked_prefill_size=64, max_total_tokens=512, graph=no_graphs,
    )  # fmt: skip
    model_config = ModelConfig.from_folder(folder)
    worker = ModelWorker(config, model_config, load_model(config, model_config, CPU), CPU)
    worker.plan_memory()
    worker.build_runners()
    return worker


@pytest.mark.parametrize("variant", ["llama", "qwen3_tied"])
def test_two_prompts_of_one_step_get_what_transformers_gives(variant: str, tmp_path: Path) -> None:
    reference = save_reference(variant, tmp_path)
    worker = make_worker(tmp_path)
    driver = WorkerDriver(worker)
    generator = torch.Generator().manual_seed(3)
    prompts = {
        row: torch.randint(3, 199, (length,), generator=generator).tolist()
        for row, length in ((1, 30), (2, 17))
    }
    # all of the first, of the second from token 6 on
    wishes = {0: PromptWish(0, prompts[1][1:], K), 1: PromptWish(5, prompts[2][6:], 0)}
    batch = driver.extend(prompts, sampling=SamplingBatch(prompt_logprobs=wishes))
    found = worker.launch(batch).wait().prompt_logprobs
    for index, (row, first) in enumerate(((1, 1), (2, 6))):
        ids = prompts[row]
        with torch.no_grad():
            expected = reference(torch.tensor([ids])).logits[0].log_softmax(-1)
        assert len(found[index]) == len(ids) - first
        for at, entry in enumerate(found[index], start=first):
            assert entry.logprob == pytest.approx(expected[at - 1, ids[at]].item(), abs=1e-4)
        if wishes[index].k:
            best = expected[first - 1 : -1].topk(K)
            assert [entry.top_ids for entry in found[index]] == best.indices.tolist()
        else:
            assert all(entry.top_ids == [] for entry in found[index])
    worker.close()


def test_a_wish_beyond_the_rows_of_a_step_is_refused() -> None:
    hidden = torch.zeros(5, 8)
    for wish in (PromptWish(3, [1, 2, 3], 0), PromptWish(5, [1], 0)):
        with pytest.raises(ValueError, match="rows"):
            score_prompt(hidden, {0: wish}, [5], lambda rows: rows, vocab_size=8)
