"""The model, the sampler and dummy weights on CUDA, against transformers and the CPU."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from duograph.kernels import sampling
from duograph.runners.config import RunnerConfig
from duograph.runners.model_config import ModelConfig
from duograph.runners.models.dummy import fill_with_dummy_weights
from duograph.runners.models.llama import create_model
from duograph.runners.models.loader import load_model
from duograph.tests.paged_session import PagedSession
from duograph.tests.runners.tiny_models import save_reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = torch.device("cuda")
BACKENDS = ["torch", "triton"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("variant", ["llama_rope_llama3", "qwen2", "qwen3"])
def test_prefill_and_decode_match_transformers(variant: str, backend: str, tmp_path: Path) -> None:
    reference = save_reference(variant, tmp_path)
    config = RunnerConfig(model_path=str(tmp_path), dtype="float32")
    model = load_model(config, ModelConfig.from_folder(tmp_path), CUDA)
    session = PagedSession(model, device=CUDA, backend=backend, page_size=16)
    ids = torch.randint(3, 199, (70,), generator=torch.Generator().manual_seed(1)).tolist()
    with torch.no_grad():
        expected = reference(torch.tensor([ids])).logits[0]
    seen = [session.extend({1: ids[:20]}), session.extend({1: ids[20:50]}, padding=7)]
    seen += [session.decode({1: token}, padding=2) for token in ids[50:]]
    # Triton multiplies float32 as TF32 or in another order; the tiny logits are around 3.
    limit = 1e-3 if backend == "torch" else 2e-2
    torch.testing.assert_close(torch.cat(seen), expected, atol=limit, rtol=0)


def test_random_bits_and_draws_are_those_of_the_cpu() -> None:
    generator = torch.Generator().manual_seed(0)
    n, vocab = 64, 50_000
    seed = torch.randint(-(2**63), 2**63 - 1, (n,), generator=generator)
    position = torch.randint(0, 2**31, (n,), generator=generator)
    token = torch.arange(vocab, dtype=torch.int32).unsqueeze(0)
    on_cpu = sampling.random_bits(seed, position, token)
    on_gpu = sampling.random_bits(seed.cuda(), position.cuda(), token.cuda())
    assert torch.equal(on_cpu, on_gpu.cpu())

    logits = torch.randn(n, vocab, generator=generator) * 4
    arguments = {
        "temperature": torch.where(torch.arange(n) % 4 == 0, 0.0, 0.8),
        "top_k": torch.where(torch.arange(n) % 3 == 0, 20, -1),
        "top_p": torch.where(torch.arange(n) % 3 == 1, 0.9, 1.0),
        "min_p": torch.where(torch.arange(n) % 5 == 0, 0.05, 0.0),
        "seed": seed,
        "position": position,
    }
    moved = {name: value.cuda() for name, value in arguments.items()}
    for filtered in (False, True):
        ours = sampling.sample(logits, filtered=filtered, **arguments)
        theirs = sampling.sample(logits.cuda(), filtered=filtered, **moved)
        assert torch.equal(ours, theirs.cpu())


@pytest.mark.parametrize("filtered", [False, True])
def test_sampling_can_be_captured_and_sees_new_values(filtered: bool) -> None:
    n, vocab = 4, 1000
    logits = torch.randn(n, vocab, device=CUDA)
    arguments = {
        "temperature": torch.full((n,), 0.9, device=CUDA),
        "top_k": torch.full((n,), 50, device=CUDA),
        "top_p": torch.full((n,), 0.9, device=CUDA),
        "min_p": torch.zeros(n, device=CUDA),
        "seed": torch.arange(n, device=CUDA),
        "position": torch.zeros(n, dtype=torch.int64, device=CUDA),
    }
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        sampling.sample(logits, filtered=filtered, **arguments)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = sampling.sample(logits, filtered=filtered, **arguments)
    for step in range(5):
        arguments["position"].fill_(step)
        logits.normal_()
        graph.replay()
        assert torch.equal(captured, sampling.sample(logits, filtered=filtered, **arguments))


def test_eight_billion_dummy_weights_are_drawn_on_the_device_in_seconds() -> None:
    config = ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=128_256,
        hidden_size=4096,
        intermediate_size=14_336,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        context_length=8192,
        rms_eps=1e-5,
    )
    started = time.perf_counter()
    with torch.no_grad():
        model = create_model(config, dtype=torch.bfloat16, device=CUDA)
        fill_with_dummy_weights(model)
    torch.cuda.synchronize()
    assert time.perf_counter() - started < 30.0
    assert model.weight_bytes() == 2 * config.num_parameters
    session = PagedSession(model, rows=2, device=CUDA, backend="triton", page_size=16)
    logits = session.extend({1: list(range(100, 200))})
    assert logits.isfinite().all()
    assert 0.05 < float(logits.std()) < 20.0
