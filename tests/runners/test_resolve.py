"""From "choose for me" to a complete configuration, and what is refused on the way."""

from __future__ import annotations

import pytest
import torch

from duograph.runners import attention_choice, resolve
from duograph.runners.config import ConfigError, GraphConfig, RunnerConfig
from duograph.runners.memory import GIB
from duograph.runners.resolve import resolve_auto, resolve_device
from duograph.tests.worker_driver import tiny_config

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
LONG = tiny_config(context_length=8192, dtype="bfloat16", head_dim=128)


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolve, "total_bytes", lambda device: 140 * GIB)
    monkeypatch.setattr(attention_choice, "cuda_capability", lambda device: 9)


def test_the_cpu_gets_short_lists_and_small_steps() -> None:
    config = resolve_auto(RunnerConfig(), LONG, CPU)
    assert config.device == "cpu" and config.attention_backend == "torch"
    assert config.dtype == "bfloat16" and config.context_length == 8192
    assert config.max_running_requests == 32 and config.chunked_prefill_size == 512
    assert config.graph.cuda_graph_bs == (1, 2, 4, 8, 16, 32)
    assert config.graph.piecewise_cuda_graph_tokens == (16, 64, 128, 256, 512)
    assert config.graph.piecewise_cuda_graph_compiler == "eager"


@pytest.mark.usefixtures("h200")
def test_a_large_gpu_gets_the_full_schedules() -> None:
    config = resolve_auto(RunnerConfig(), LONG, CUDA)
    assert config.prefill_attention_backend == "triton+flashinfer"
    assert config.decode_attention_backend == "triton"
    assert config.max_running_requests == config.graph.cuda_graph_max_bs == 256
    assert config.graph.cuda_graph_bs is not None and len(config.graph.cuda_graph_bs) == 36
    assert config.chunked_prefill_size == config.graph.piecewise_cuda_graph_max_tokens == 8192


def test_resolving_twice_changes_nothing() -> None:
    once = resolve_auto(RunnerConfig(graph=GraphConfig(cuda_graph_max_bs=6)), LONG, CPU)
    assert resolve_auto(once, LONG, CPU) == once


def test_the_running_limit_follows_the_largest_graph_and_the_other_way_round() -> None:
    by_graph = resolve_auto(RunnerConfig(graph=GraphConfig(cuda_graph_max_bs=6)), LONG, CPU)
    assert by_graph.max_running_requests == 6
    by_limit = resolve_auto(RunnerConfig(max_running_requests=6), LONG, CPU)
    assert by_limit.graph.cuda_graph_bs == (1, 2, 4, 6)


def test_nothing_is_captured_beyond_context_chunk_or_limit() -> None:
    short = tiny_config(context_length=100)
    graph = GraphConfig(
        cuda_graph_bs=(3, 64, 1), piecewise_cuda_graph_tokens=(2048, 8), cuda_graph_max_bs=None
    )
    config = resolve_auto(RunnerConfig(max_running_requests=4, graph=graph), short, CPU)
    assert config.chunked_prefill_size == 100
    assert config.graph.cuda_graph_bs == (1, 3, 4)
    assert config.graph.piecewise_cuda_graph_tokens == (8, 100)


@pytest.mark.parametrize(
    ("config", "flag"),
    [
        (RunnerConfig(context_length=9000), "--context-length 9000"),
        (RunnerConfig(attention_backend="triton"), "--attention-backend triton"),
        (
            RunnerConfig(decode_attention_backend="flashinfer"),
            "--decode-attention-backend flashinfer",
        ),
        (RunnerConfig(graph=GraphConfig(enable_torch_compile=True)), "--enable-torch-compile"),
        (
            RunnerConfig(graph=GraphConfig(piecewise_cuda_graph_compiler="inductor")),
            "--piecewise-cuda-graph-compiler inductor",
        ),
    ],
)
def test_what_the_cpu_cannot_honour_is_refused_by_name(config: RunnerConfig, flag: str) -> None:
    with pytest.raises(ConfigError, match=flag):
        resolve_auto(config, LONG, CPU)


def test_a_device_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device("auto") == resolve_device("cpu") == "cpu"
    with pytest.raises(ConfigError, match="--device cuda"):
        resolve_device("cuda")
