"""--enable-profile-cuda-graph over recorded graphs; tests/gpu has it over CUDA graphs."""

from __future__ import annotations

import gzip
import json
import logging
import tempfile
from pathlib import Path

import pytest

from duograph.runners.config import ConfigError, GraphConfig
from duograph.tests.worker_driver import make_worker


def test_captures_and_one_replay_of_each_phase_are_profiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    graph = GraphConfig(
        enable_profile_cuda_graph=True, cuda_graph_bs=(1, 2), piecewise_cuda_graph_tokens=(16,)
    )
    with caplog.at_level(logging.INFO):
        worker = make_worker(graph=graph)
    [folder] = [path for path in tmp_path.iterdir() if "graph-profile" in path.name]
    assert str(folder) in caplog.text
    names = sorted(path.name for path in folder.iterdir())
    assert names == [
        f"{name}.{ending}"
        for name in ("capture", "decode-2", "extend-16")
        for ending in ("trace.json.gz", "txt")
    ]
    for name in ("capture", "decode-2", "extend-16"):
        trace = json.loads(gzip.decompress((folder / f"{name}.trace.json.gz").read_bytes()))
        called = {event.get("name") for event in trace["traceEvents"]}
        assert "aten::embedding" in called or "aten::index_select" in called
        assert "aten::" in (folder / f"{name}.txt").read_text()
    stats = worker.graph_stats()
    assert stats["decode"]["sizes"]["2"]["replays"] == 1
    assert stats["prefill"]["sizes"]["16"]["replays"] == 1
    assert stats["start_seconds"]["profile_graphs"] > 0


def test_without_graphs_there_is_nothing_to_profile() -> None:
    graph = GraphConfig(
        enable_profile_cuda_graph=True, disable_cuda_graph=True, disable_piecewise_cuda_graph=True
    )
    with pytest.raises(ConfigError, match="--enable-profile-cuda-graph has nothing to profile"):
        make_worker(graph=graph)
