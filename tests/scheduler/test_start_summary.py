"""The lines after a start, and the numbers of an out-of-memory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from duograph.runners.config import GraphConfig, RunnerConfig
from duograph.runners.memory_plan import MemoryPlanError
from duograph.scheduler.config import SchedulerConfig
from duograph.scheduler.engine_config import EngineConfig
from duograph.scheduler.exit_codes import ExitCode
from duograph.scheduler.failures import explain
from duograph.scheduler.start_summary import memory_numbers, summary_lines
from duograph.tests.scheduler.fake_worker import LIMITS
from duograph.tests.scheduler.test_stats import GRAPH_STATS

MODELS = Path(__file__).parents[1] / "benchmarks" / "models"


def engine_config(folder: str, **runner: object) -> EngineConfig:
    return EngineConfig(
        runner=RunnerConfig(**runner),  # type: ignore[arg-type]
        scheduler=SchedulerConfig(),
        run_dir="",
        num_frontends=1,
        parent_pid=os.getpid(),
        model_folder=folder,
        served_name="x",
    )


def test_a_start_is_told_in_three_lines() -> None:
    details = {"architecture": "LlamaForCausalLM", "dtype": "bfloat16", "device": "cuda"}
    model, pool, graphs = summary_lines(details, LIMITS, GRAPH_STATS)
    assert model == "Model: LlamaForCausalLM, bfloat16, cuda, 1.50 GB of weights"
    assert pool.startswith("KV pool: 256 tokens in pages of 4, 1.00 GB; context 128, 4 requests")
    assert graphs.startswith("Graphs: decode 2 sizes up to 4 bs in 0.8 s; prefill off; ")


def test_dropped_sizes_are_told() -> None:
    dropped = {**GRAPH_STATS, "decode": {**GRAPH_STATS["decode"], "dropped": [8, 16]}}  # type: ignore[dict-item]
    assert "2 dropped for want of memory" in summary_lines({}, LIMITS, dropped)[2]


def test_an_out_of_memory_comes_with_numbers_of_model_flags_and_device() -> None:
    config = engine_config(
        str(MODELS / "llama-1b"),
        device="cpu",
        max_running_requests=9,
        graph=GraphConfig(disable_piecewise_cuda_graph=True),
    )
    error = RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
    code, text = explain(error, "capturing_decode", lambda: memory_numbers(config))
    assert code is ExitCode.OUT_OF_MEMORY
    for word in ("2.30 GB in bfloat16", "32 KiB", "cpu has", "GB of it free",
                 "--max-running-requests 9", "--cuda-graph-max-bs 9", "--disable-cuda-graph",
                 "Tried to allocate 2.00 GiB"):  # fmt: skip
        assert word in text, word
    assert "--piecewise" not in text and "\n" not in text


@pytest.mark.parametrize("phase", ["loading_weights", "capturing_prefill", "ready"])
def test_the_numbers_are_asked_for_when_memory_was_short_and_only_then(phase: str) -> None:
    def numbers() -> str:
        asked.append(phase)
        return "Numbers."

    asked: list[str] = []
    explain(ValueError("something else"), phase, numbers)  # type: ignore[arg-type]
    assert not asked
    assert explain(MemoryError(), phase, numbers)[1].endswith("Numbers.")  # type: ignore[arg-type]
    assert explain(MemoryPlanError("no room"), phase, numbers)[1] == "no room. Numbers."  # type: ignore[arg-type]


def test_no_numbers_do_not_hide_the_error(tmp_path: Path) -> None:
    config = engine_config(str(tmp_path), device="cpu")
    assert memory_numbers(config) == ""
    text = explain(MemoryError(), "loading_weights", lambda: memory_numbers(config))[1]
    assert text.startswith("out of memory while loading weights")
