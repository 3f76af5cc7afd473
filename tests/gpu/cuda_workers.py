"""Workers over tiny models on CUDA, and engines, as the tests of this folder build them."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest
import torch

from duograph.kernels.attention.registry import BACKENDS
from duograph.runners.config import GraphConfig, RunnerConfig
from duograph.runners.worker import ModelWorker
from duograph.scheduler.config import SchedulerConfig
from duograph.scheduler.engine_config import EngineConfig
from duograph.tests.worker_driver import make_worker

SHAPE: dict[str, object] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_heads": 6,
    "num_kv_heads": 2,
    "head_dim": 64,
    "context_length": 512,
}
DECODE = GraphConfig(disable_piecewise_cuda_graph=True)
PREFILL = GraphConfig(disable_cuda_graph=True)
NONE = GraphConfig(disable_cuda_graph=True, disable_piecewise_cuda_graph=True)

_HAS_FLASHINFER = "flashinfer" in BACKENDS and importlib.util.find_spec("flashinfer") is not None
GRAPH_BACKENDS = [
    pytest.param("triton"),
    pytest.param(
        "flashinfer",
        marks=pytest.mark.skipif(not _HAS_FLASHINFER, reason="flashinfer is not installed"),
    ),
]
"""Parameters: every attention backend that runs inside a CUDA graph."""


def cuda_worker(
    graph: GraphConfig,
    dtype: torch.dtype = torch.bfloat16,
    model: dict[str, object] | None = None,
    **options: object,
) -> ModelWorker:
    """Captured; ``model`` changes SHAPE, ``options`` are RunnerConfig's."""
    settings: dict[str, object] = {
        "max_running_requests": 20,
        "chunked_prefill_size": 256,
        "max_total_tokens": 4096,
        "page_size": 16,
    }
    return make_worker(
        device="cuda",
        dtype=dtype,
        graph=graph,
        model_changes=SHAPE | (model or {}),
        **(settings | options),  # type: ignore[arg-type]
    )


def engine_config(
    folder: Path,
    graph: GraphConfig,
    **options: object,
) -> EngineConfig:
    """Of an OfflineEngine on CUDA without a prefix cache; ``options`` are RunnerConfig's."""
    runner = RunnerConfig(
        model_path=str(folder),
        device="cuda",
        graph=graph,
        **options,  # type: ignore[arg-type]
    )
    return EngineConfig(
        runner=runner,
        scheduler=SchedulerConfig(disable_radix_cache=True),
        run_dir="",
        num_frontends=1,
        parent_pid=os.getpid(),
        model_folder=str(folder),
        served_name="test",
    )
