"""The real default model on CUDA in bfloat16: greedy text is what float32 on the CPU writes, but
where two tokens are so close that rounding decides."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from duograph.runners.config import GraphConfig
from duograph.runners.model_config import ModelConfig
from duograph.runners.sampling_params import SamplingParams
from duograph.scheduler.offline import OfflineEngine
from duograph.tests.gpu.cuda_workers import GRAPH_BACKENDS, engine_config
from duograph.tests.plain_llama import PlainLlama, RoundingBound

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.model,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
NEW_TOKENS = 32
PROMPTS = (
    "The capital of France is",
    "1, 2, 3, 4, 5,",
    "Once upon a time there was a",
    "Water boils at a temperature of",
    "def fibonacci(n):\n",
    "Photosynthesis is the process by which",
    "The largest planet in the solar system is",
    "Dear Sir or Madam,\n\nI am writing to",
    "In 1969, the first man",
    "The opposite of hot is",
    "To bake a cake, first",
    "import numpy as np\n\ndef mean(values):",
    "The three branches of government are",
    "Q: How many legs does a spider have?\nA:",
    "She opened the door and saw",
    "The theory of evolution was proposed by",
    "Monday, Tuesday, Wednesday,",
    "A good way to learn a language is",
    "The square root of 144 is",
    "It was a dark and stormy night, and",
)


@pytest.fixture(scope="module")
def tokenizer(default_model_folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(default_model_folder / "tokenizer.json"))


@pytest.fixture(scope="module")
def reference(default_model_folder: Path) -> Iterator[PlainLlama]:
    """In float32 on half of the cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(max(1, (os.cpu_count() or 2) // 2))
    config = ModelConfig.from_folder(default_model_folder)
    yield PlainLlama(config, load_file(default_model_folder / "model.safetensors"))
    torch.set_num_threads(threads)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Of all tokens that were written, in one row.

    ``lost`` is by how much float32 liked its own best token better than the written one, zero
    where they are the same; ``gap`` its best two logits' distance, and ``moved`` by how much
    rounding alone changes that.
    """

    lost: torch.Tensor
    gap: torch.Tensor
    moved: torch.Tensor
    equal_texts: int


def compare(
    reference: PlainLlama, prompts: list[list[int]], answers: list[list[int]]
) -> Comparison:
    """The whole text is fed to the reference, so that every token is judged after the very
    tokens it was written after, also those behind a first difference."""
    lost, gap, moved = [], [], []
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = prompt + answer[:-1]
        exact = reference.logits(ids)[len(prompt) - 1 :]
        rounded = reference.logits(ids, rounded=True)[len(prompt) - 1 :]
        best = exact.topk(2)
        lost.append(best.values[:, 0] - exact[torch.arange(len(answer)), torch.tensor(answer)])
        gap.append(best.values[:, 0] - best.values[:, 1])
        error = (rounded - exact).gather(1, best.indices)
        moved.append(error[:, 0] - error[:, 1])
    equal = sum(not bool(one.any()) for one in lost)
    return Comparison(torch.cat(lost), torch.cat(gap), torch.cat(moved), equal)


def check(found: Comparison) -> None:
    """Another token than float32's is chosen only where rounding can close the gap, and no more
    often than normal errors of its size would do it."""
    sigma = float(found.moved.square().mean().sqrt())
    limit = RoundingBound(sigma).largest(len(found.lost))
    other = int((found.lost > 0).sum())
    expected = float(torch.special.ndtr(-found.gap / sigma).sum())
    print(
        f"{len(found.lost)} tokens, {found.equal_texts} texts equal, {other} near-ties decided "
        f"otherwise ({expected:.1f} expected), farthest {float(found.lost.max()):.3f}, rounding "
        f"moves a gap by {sigma:.3f} (rms), limit {limit:.3f}"
    )
    assert float(found.lost.max()) <= limit
    assert other <= expected + 4 * max(1.0, expected) ** 0.5
    assert sigma < 0.1 * float(found.gap.mean()), "rounding alone would hide a mistake"


@pytest.mark.parametrize("backend", GRAPH_BACKENDS)
def test_greedy_text_is_that_of_float32_up_to_near_ties(
    default_model_folder: Path, tokenizer: Tokenizer, reference: PlainLlama, backend: str
) -> None:
    prompts = [tokenizer.encode(text).ids for text in PROMPTS]
    engine = OfflineEngine(
        engine_config(
            default_model_folder,
            GraphConfig(cuda_graph_max_bs=32, piecewise_cuda_graph_max_tokens=512),
            attention_backend=backend,
            max_running_requests=32,
            max_total_tokens=8192,
            context_length=1024,
        )
    )
    sampling = SamplingParams(temperature=0.0, max_new_tokens=NEW_TOKENS, ignore_eos=True)
    together = [found.tokens for found in engine.generate(prompts, [sampling] * len(prompts))]
    alone = [engine.generate([prompt], [sampling])[0].tokens for prompt in prompts]
    assert engine.graph_stats()["eager_steps"] == {"decode": {}, "prefill": {}}
    for answers in (together, alone):
        assert [len(answer) for answer in answers] == [NEW_TOKENS] * len(prompts)
        check(compare(reference, prompts, answers))
    texts = [tokenizer.decode(answer) for answer in together]
    assert texts[0].startswith(" Paris"), texts[0]
    assert texts[1].startswith(" 6, 7, 8, 9, 10"), texts[1]
