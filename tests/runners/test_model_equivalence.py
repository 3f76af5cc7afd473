"""Our model against transformers: tiny random ones of every architecture, and the real weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer

from duograph.runners.config import RunnerConfig
from duograph.runners.layers.rotary import inverse_frequencies
from duograph.runners.model_config import ModelConfig, RopeConfig
from duograph.runners.models.llama import CausalLM
from duograph.runners.models.loader import load_model
from duograph.tests.paged_session import PagedSession
from duograph.tests.runners.tiny_models import VARIANTS, edit_config, round_weights, save_reference

CPU = torch.device("cpu")


def load(folder: Path, dtype: str = "float32") -> CausalLM:
    config = RunnerConfig(model_path=str(folder), dtype=dtype)
    return load_model(config, ModelConfig.from_folder(folder), CPU)


def reference_logits(reference: Any, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = reference(torch.tensor([ids])).logits[0]
    return logits


def tokens_for(seed: int, count: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    ids: list[int] = torch.randint(3, 199, (count,), generator=generator).tolist()
    return ids


@pytest.mark.parametrize("variant", VARIANTS)
def test_prefill_and_decode_match_transformers(variant: str, tmp_path: Path) -> None:
    """A whole prompt, then one token at a time over the paged pool."""
    reference = save_reference(variant, tmp_path)
    session = PagedSession(load(tmp_path))
    ids = tokens_for(1, 90)
    expected = reference_logits(reference, ids)
    assert expected.std() > 0.5, "logits too flat to tell models apart"
    seen = [session.extend({1: ids[:70]})]
    seen += [session.decode({1: token}) for token in ids[70:]]
    torch.testing.assert_close(torch.cat(seen), expected, atol=1e-4, rtol=0)


def test_chunks_batches_and_padding_match_transformers(tmp_path: Path) -> None:
    """Three prompts of different length, in chunks, together, with padding rows in between."""
    reference = save_reference("llama", tmp_path)
    session = PagedSession(load(tmp_path))
    prompts = {row: tokens_for(row, length) for row, length in ((1, 40), (2, 9), (3, 23))}
    expected = {row: reference_logits(reference, ids) for row, ids in prompts.items()}
    seen: dict[int, list[torch.Tensor]] = {row: [] for row in prompts}
    for start in range(0, 40, 8):
        chunks = {row: ids[start : start + 8] for row, ids in prompts.items() if ids[start:]}
        logits = session.extend(chunks, padding=5).split([len(c) for c in chunks.values()])
        for row, part in zip(chunks, logits, strict=True):
            seen[row].append(part)
    for row in prompts:
        torch.testing.assert_close(torch.cat(seen[row]), expected[row], atol=1e-4, rtol=0)
    step = session.decode(dict.fromkeys(prompts, 5), padding=3)
    for logits, ids in zip(step, prompts.values(), strict=True):
        expected_row = reference_logits(reference, [*ids, 5])[-1]
        torch.testing.assert_close(logits, expected_row, atol=1e-4, rtol=0)


def test_what_the_dummy_slot_holds_does_not_matter(tmp_path: Path) -> None:
    save_reference("llama", tmp_path)
    model = load(tmp_path)
    answers = []
    for dummy in (0.0, float("nan")):
        session = PagedSession(model)
        for cache in (*session.pool.k, *session.pool.v):
            cache[0] = dummy
        logits = [session.extend({1: tokens_for(1, 10), 2: tokens_for(2, 21)}, padding=3)]
        for cache in (*session.pool.k, *session.pool.v):
            cache[0] = dummy
        logits.append(session.decode({1: 7, 2: 9}, padding=2))
        answers.append(torch.cat(logits))
    assert answers[0].isfinite().all()
    assert torch.equal(answers[0], answers[1])


def test_an_old_style_config_gives_the_same_model(tmp_path: Path) -> None:
    reference = save_reference("llama_rope_llama3", tmp_path)
    scaling = dict(reference.config.rope_parameters)
    theta = scaling.pop("rope_theta")
    edit_config(tmp_path, rope_parameters=None, rope_scaling=scaling, rope_theta=theta)
    ids = tokens_for(1, 60)
    seen = PagedSession(load(tmp_path)).extend({1: ids})
    torch.testing.assert_close(seen, reference_logits(reference, ids), atol=1e-4, rtol=0)


def test_packed_weights_stay_close_to_the_same_weights_in_float32(tmp_path: Path) -> None:
    """bfloat16 on CPU: weights are rounded, sums are not."""
    reference = round_weights(save_reference("qwen2", tmp_path))
    session = PagedSession(load(tmp_path, "bfloat16"))
    if session.model.activation_dtype != torch.float32:
        pytest.skip("this build of torch has no FBGEMM")
    ids = tokens_for(1, 50)
    seen = torch.cat([session.extend({1: ids[:30]}), *[session.decode({1: t}) for t in ids[30:]]])
    torch.testing.assert_close(seen, reference_logits(reference, ids), atol=1e-3, rtol=0)


@pytest.mark.parametrize("scaling", [{}, {"factor": 8.0}, {"factor": 32.0, "theta": 5e5}])
def test_llama3_frequencies_match_transformers(scaling: dict[str, float]) -> None:
    factor, theta = scaling.get("factor", 1.0), scaling.get("theta", 1e4)
    parameters = {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = transformers.LlamaConfig(
        hidden_size=1024, num_attention_heads=8, rope_parameters=parameters
    )
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    expected, attention_factor = ROPE_INIT_FUNCTIONS["llama3"](config, CPU)
    assert attention_factor == 1.0
    rope = RopeConfig(theta=theta, kind="llama3", factor=factor)
    seen = inverse_frequencies(rope, head_dim=128).float()
    torch.testing.assert_close(seen, expected, rtol=1e-5, atol=0)


# Greedy answers of the real weights, see the table of expected answers: prompt, its number of
# tokens, first output ids. Chosen where the two best logits are far enough apart.
RAW_PROMPTS = [
    (
        "1, 2, 3, 4, 5,",
        14,
        [216, 38, 28, 216, 39, 28, 216, 40, 28, 216, 41, 28, 216, 33, 32, 28],
    ),
    ("The capital of France is", 5, [7042, 30, 198, 198, 504, 2988, 314]),
    ("def fibonacci(n):\n", 7, [198, 1604, 3987, 46477, 24, 94, 727, 472]),
]
CHAT_PROMPTS = [
    ("What is the capital of France?", 37, [504, 3575, 282, 4649, 314, 7042, 30, 2]),
    (
        "Why is the sky blue? Answer in one sentence.",
        41,
        [504, 6376, 314, 4461, 975, 282, 253, 980, 1217, 13739],
    ),
]


def prompt_ids(folder: Path, prompt: str, chat: bool) -> list[int]:
    if not chat:
        ids: list[int] = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(prompt).ids
        return ids
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}], add_generation_prompt=True, tokenize=False
    )
    chat_ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return chat_ids


@pytest.fixture(scope="module")
def real_model(default_model_folder: Path) -> CausalLM:
    return load(default_model_folder)


@pytest.fixture(scope="module")
def real_packed_model(default_model_folder: Path) -> CausalLM:
    return load(default_model_folder, "bfloat16")


@pytest.mark.model
@pytest.mark.parametrize(
    ("prompt", "length", "expected", "chat"),
    [(*case, False) for case in RAW_PROMPTS] + [(*case, True) for case in CHAT_PROMPTS],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_real_weights_give_the_expected_text(
    dtype: str,
    prompt: str,
    length: int,
    expected: list[int],
    chat: bool,
    default_model_folder: Path,
    request: pytest.FixtureRequest,
) -> None:
    name = "real_model" if dtype == "float32" else "real_packed_model"
    session = PagedSession(request.getfixturevalue(name), rows=1, page_size=16)
    ids = prompt_ids(default_model_folder, prompt, chat)
    assert len(ids) == length
    assert session.greedy(1, ids, len(expected)) == expected


@pytest.mark.model
def test_real_weights_give_the_logits_of_transformers(
    real_model: CausalLM, default_model_folder: Path
) -> None:
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        default_model_folder, dtype=torch.float32
    )
    ids = prompt_ids(default_model_folder, CHAT_PROMPTS[0][0], chat=True)
    session = PagedSession(real_model, rows=1, page_size=16)
    seen = torch.cat([session.extend({1: ids[:30]}), *[session.decode({1: t}) for t in ids[30:]]])
    expected = reference_logits(reference, ids)
    torch.testing.assert_close(seen, expected, atol=2e-3, rtol=0)
    generated = reference.generate(
        torch.tensor([ids]), do_sample=False, max_new_tokens=12, eos_token_id=None
    )
    fresh = PagedSession(real_model, rows=1, page_size=16)
    assert fresh.greedy(1, ids, 12) == generated[0, len(ids) :].tolist()
