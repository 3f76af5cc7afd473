"""The graph flags on CUDA graphs: what is captured, which runner takes a step, what is counted, and
a start that has too little memory for some sizes."""

from __future__ import annotations

import gzip
import json
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from duograph.runners.config import GraphConfig
from duograph.runners.worker import ModelWorker
from duograph.tests.gpu.cuda_workers import SHAPE, cuda_worker
from duograph.tests.worker_driver import WorkerDriver, make_worker

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
MIB = 1 << 20


def replays(worker: ModelWorker, phase: str) -> dict[int, int]:
    """Replays of each captured size that had any."""
    sizes = worker.graph_stats()[phase]["sizes"]
    return {int(size): one["replays"] for size, one in sizes.items() if one["replays"]}


def test_exact_sizes_are_captured_and_the_next_one_up_is_replayed() -> None:
    worker = cuda_worker(
        GraphConfig(cuda_graph_bs=(3, 7, 15), piecewise_cuda_graph_tokens=(24, 100))
    )
    stats = worker.graph_stats()
    assert list(stats["decode"]["sizes"]) == ["3", "7", "15"]
    assert list(stats["prefill"]["sizes"]) == ["24", "100"]
    driver = WorkerDriver(worker)
    driver.start(dict.fromkeys(range(1, 17), 10))  # 16 prompts of 10 tokens: level 24
    for tokens in (24, 25, 100, 101):
        worker.launch(driver.extend({17: driver.prompt(tokens)})).wait()
    assert replays(worker, "prefill") == {24: 17, 100: 2}
    for rows in (1, 3, 4, 15, 16):
        worker.launch(driver.decode(list(range(1, rows + 1)))).wait()
    assert replays(worker, "decode") == {3: 2, 7: 1, 15: 1}
    assert worker.graph_stats()["eager_steps"] == {
        "decode": {"too_large": 1},
        "prefill": {"too_large": 1},
    }


def test_maximum_sizes_end_the_schedules() -> None:
    worker = cuda_worker(GraphConfig(cuda_graph_max_bs=6, piecewise_cuda_graph_max_tokens=50))
    stats = worker.graph_stats()
    assert list(stats["decode"]["sizes"]) == ["1", "2", "4", "6"]
    assert list(stats["prefill"]["sizes"])[-2:] == ["48", "50"]


def test_without_padding_every_size_is_captured() -> None:
    worker = cuda_worker(
        GraphConfig(
            cuda_graph_max_bs=5, disable_cuda_graph_padding=True, disable_piecewise_cuda_graph=True
        )
    )
    driver = WorkerDriver(worker)
    driver.start(dict.fromkeys(range(1, 6), 10))
    for rows in range(1, 6):
        worker.launch(driver.decode(list(range(1, rows + 1)))).wait()
    assert replays(worker, "decode") == dict.fromkeys(range(1, 6), 1)


@pytest.mark.parametrize("disabled", ["decode", "prefill"])
def test_a_disabled_phase_runs_eagerly_and_the_other_by_graph(disabled: str) -> None:
    worker = cuda_worker(
        GraphConfig(
            disable_cuda_graph=disabled == "decode",
            disable_piecewise_cuda_graph=disabled == "prefill",
        )
    )
    driver = WorkerDriver(worker)
    driver.start({1: 10, 2: 20})
    worker.launch(driver.decode([1, 2])).wait()
    stats = worker.graph_stats()
    assert not stats[disabled]["enabled"] and not stats[disabled]["sizes"]
    steps = {"decode": 1, "prefill": 2}
    assert stats["eager_steps"][disabled] == {"disabled": steps[disabled]}
    other = "prefill" if disabled == "decode" else "decode"
    assert sum(replays(worker, other).values()) == steps[other]
    assert stats["eager_steps"][other] == {}


def test_captures_and_replays_are_profiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    graph = GraphConfig(
        enable_profile_cuda_graph=True, cuda_graph_bs=(1, 4), piecewise_cuda_graph_tokens=(64,)
    )
    with caplog.at_level(logging.INFO):
        cuda_worker(graph)
    [folder] = [path for path in tmp_path.iterdir() if "graph-profile" in path.name]
    assert str(folder) in caplog.text
    for name in ("decode-4", "extend-64"):
        trace = json.loads(gzip.decompress((folder / f"{name}.trace.json.gz").read_bytes()))
        kernels = [event for event in trace["traceEvents"] if event.get("cat") == "kernel"]
        assert len(kernels) > 10  # two layers
        assert "cudaGraphLaunch" in (folder / f"{name}.txt").read_text()
    assert (folder / "capture.txt").stat().st_size > 0


@pytest.fixture
def memory_limit() -> Iterator[None]:
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.empty_cache()


def leave_room(megabytes: int) -> None:
    """The allocator of this process gets no more than it has and ``megabytes``."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    limit = torch.cuda.memory_reserved() + megabytes * MIB
    torch.cuda.set_per_process_memory_fraction(limit / total)


# Logits of 256 rows take 200 MiB: the first margin is too small for the eager warm-up, the
# second for the capture that follows it.
@pytest.mark.parametrize("margin", [150, 300])
def test_decode_sizes_without_memory_are_dropped_and_the_flag_is_named(
    margin: int, memory_limit: None, caplog: pytest.LogCaptureFixture
) -> None:
    worker = make_worker(
        device="cuda",
        dtype=torch.bfloat16,
        graph=GraphConfig(cuda_graph_bs=(256, 2), disable_piecewise_cuda_graph=True),
        model_changes=SHAPE | {"vocab_size": 400_000},
        max_running_requests=256,
        max_total_tokens=4096,
        capture=False,
    )
    leave_room(margin)
    worker.capture(lambda phase, done, total: None)
    stats = worker.graph_stats()
    assert list(stats["decode"]["sizes"]) == ["2"] and stats["decode"]["dropped"] == [256]
    assert "--cuda-graph-max-bs below 256" in caplog.text
    torch.cuda.set_per_process_memory_fraction(1.0)
    driver = WorkerDriver(worker)
    driver.start({1: 5, 2: 6, 3: 7})
    by_graph = worker.launch(driver.decode([1, 2])).wait().tokens
    assert len(by_graph) == 2 and replays(worker, "decode") == {2: 1}
    worker.launch(driver.decode([1, 2, 3])).wait()
    assert worker.graph_stats()["eager_steps"]["decode"] == {"too_large": 1}


def test_prefill_levels_without_memory_are_dropped_and_the_flag_is_named(
    memory_limit: None, caplog: pytest.LogCaptureFixture
) -> None:
    worker = make_worker(
        device="cuda",
        dtype=torch.bfloat16,
        graph=GraphConfig(piecewise_cuda_graph_tokens=(32768, 16), disable_cuda_graph=True),
        model_changes=SHAPE | {"hidden_size": 4096, "context_length": 32768},
        chunked_prefill_size=32768,
        max_total_tokens=40_000,
        capture=False,
    )
    leave_room(200)  # the hidden states of 32768 tokens take 256 MiB
    worker.capture(lambda phase, done, total: None)
    stats = worker.graph_stats()
    assert list(stats["prefill"]["sizes"]) == ["16"] and stats["prefill"]["dropped"] == [32768]
    assert "--piecewise-cuda-graph-max-tokens below 32768" in caplog.text
    torch.cuda.set_per_process_memory_fraction(1.0)
    driver = WorkerDriver(worker)
    driver.start({1: 16, 2: 17})
    assert replays(worker, "prefill") == {16: 1}
    assert worker.graph_stats()["eager_steps"]["prefill"] == {"too_large": 1}


START = """
import torch
from duograph.runners.config import GraphConfig
from duograph.tests.gpu.cuda_workers import cuda_worker
graph = GraphConfig(cuda_graph_bs=(1, 4), piecewise_cuda_graph_tokens=(64,))
compiles = cuda_worker(graph).graph_stats()["compiles"]
print("COMPILES", int(compiles["triton_compiled"]), int(compiles["triton_cached"]))
"""


def test_a_second_start_compiles_no_kernel(tmp_path: Path) -> None:
    environ = os.environ | {
        "PYTHONPATH": os.pathsep.join(sys.path),
        "TRITON_CACHE_DIR": str(tmp_path / "triton"),
    }

    def start() -> tuple[int, int]:
        done = subprocess.run(
            [sys.executable, "-c", START],
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
            env=environ,
        )
        assert "COMPILES" in done.stdout, done.stderr[-2000:]
        compiled, cached = done.stdout.split("COMPILES ")[1].split()
        return int(compiled), int(cached)

    def files() -> set[Path]:
        return {path for path in (tmp_path / "triton").rglob("*") if path.is_file()}

    compiled, _ = start()
    assert compiled > 0
    first = files()
    assert start() == (0, compiled)
    assert files() == first
