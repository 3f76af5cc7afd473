"""The plain reference of tests/gpu is right, and its bound passes rounding and no mistake."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from duograph.runners.config import RunnerConfig
from duograph.runners.model_config import ModelConfig
from duograph.runners.models.loader import load_model
from duograph.tests.paged_session import PagedSession
from duograph.tests.plain_llama import PlainLlama, RoundingBound
from duograph.tests.runners.tiny_models import make_reference
from duograph.tests.worker_driver import tiny_config, tiny_model

CPU = torch.device("cpu")
IDS = torch.randint(0, 97, (60,), generator=torch.Generator().manual_seed(2)).tolist()


@pytest.mark.parametrize("variant", ["llama_tied", "llama_rope_llama3", "qwen2", "qwen3"])
def test_it_computes_what_transformers_computes(variant: str, tmp_path: Path) -> None:
    reference = make_reference(variant)
    reference.save_pretrained(tmp_path)
    config = ModelConfig.from_folder(tmp_path)
    runner_config = RunnerConfig(model_path=str(tmp_path), dtype="float32")
    plain = PlainLlama.of(load_model(runner_config, config, CPU))
    with torch.no_grad():
        expected = reference(torch.tensor([IDS])).logits[0]
    torch.testing.assert_close(plain.logits(IDS), expected, atol=1e-4, rtol=1e-4)


def test_a_bfloat16_forward_is_within_the_bound_and_a_slightly_wrong_one_is_not() -> None:
    config = tiny_config(num_layers=4, hidden_size=128, num_heads=4, head_dim=32, qk_norm=True)
    model = tiny_model(config, CPU, torch.bfloat16)
    plain = PlainLlama.of(model)
    exact, rounded = plain.logits(IDS), plain.logits(IDS, rounded=True)
    bound = RoundingBound.measure(exact, rounded)
    assert 0 < bound.rms < 0.05 * exact.std()
    session = PagedSession(model)
    mine = torch.cat([session.extend({1: IDS[:40]}), session.extend({1: IDS[40:]})])
    bound.check(mine, exact)
    # the second chunk attends to all of the first but one token
    session = PagedSession(model)
    session.extend({2: IDS[:39]})
    session.extend({1: IDS[:40]})
    session.pool.k[1][session.slots(1, torch.tensor(7))] = 0.0
    with pytest.raises(AssertionError, match=r"rms|largest"):
        bound.check(session.extend({1: IDS[40:]}), exact[40:])


def test_the_largest_of_many_normal_errors_is_within_the_bound() -> None:
    errors = torch.randn(200, 10_000, generator=torch.Generator().manual_seed(0))
    limit = RoundingBound(1.0).largest(10_000)
    assert limit == pytest.approx(math.sqrt(2 * math.log(10_000)) + 2)
    assert errors.abs().amax(1).max() < limit < 2 * errors.abs().amax(1).min()
