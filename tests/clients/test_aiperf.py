"""aiperf, from a virtual environment of its own: load over HTTP, its own count of tokens."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from duograph.tests.clients.conftest import MODEL
from duograph.tests.e2e.server_process import ServerProcess

REQUESTS, TOKENS_IN, TOKENS_OUT = 8, 32, 8


@pytest.fixture
def aiperf() -> str:
    program = os.environ.get("AIPERF_BIN", "")
    if not Path(program).is_file():
        pytest.skip("AIPERF_BIN names no program; tests/clients/run.sh installs it and sets it")
    return program


def run(aiperf: str, arguments: list[str], folder: Path, model: Path) -> tuple[Any, Any]:
    """What aiperf exports: the summary, and what it read of /metrics meanwhile."""
    # a relative path: anything else is taken for the name of a model on the hub
    tokenizer = folder / "tokenizer"
    tokenizer.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model / name, tokenizer)
    variables = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    done = subprocess.run(
        [aiperf, "profile", "--tokenizer", "tokenizer", "--artifact-dir", "out", "--ui", "none",
         "--workers-max", "2", "--random-seed", "1", *arguments],
        cwd=folder, env=variables, stdin=subprocess.DEVNULL, capture_output=True, text=True,
        timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    [export] = (folder / "out").rglob("profile_export_aiperf.json")
    metrics = export.with_name("server_metrics_export.json")
    return json.loads(export.read_text()), json.loads(metrics.read_text())


@pytest.mark.parametrize("kind", ["chat", "completions"])
def test_every_request_of_a_load_is_answered_in_full(
    smol: ServerProcess, aiperf: str, tmp_path: Path, default_model_folder: Path, kind: str
) -> None:
    before = smol.settled_metric("sglang:num_requests_total")
    arguments = [
        "--model", MODEL, "--url", smol.url, "--endpoint-type", kind, "--streaming",
        "--use-server-token-count",
        "--concurrency", "2", "--request-count", str(REQUESTS),
        "--num-dataset-entries", str(REQUESTS),
        "--isl", str(TOKENS_IN), "--osl", str(TOKENS_OUT), "--extra-inputs", "ignore_eos:true",
    ]  # fmt: skip
    result, metrics = run(aiperf, arguments, tmp_path, default_model_folder)
    assert result["request_count"]["avg"] == REQUESTS
    assert not result.get("error_request_count") and not result.get("error_summary")
    assert result["output_sequence_length"]["min"] == TOKENS_OUT
    assert result["output_sequence_length"]["max"] == TOKENS_OUT
    assert 0 < result["time_to_first_token"]["p50"] < result["request_latency"]["p50"]
    assert result["inter_token_latency"]["p99"] > 0
    assert metrics["summary"]["endpoints_successful"] == [f"{smol.url}/metrics"]
    assert {"sglang:generation_tokens", "duograph_graph_replays"} <= set(metrics["metrics"])
    assert smol.settled_metric("sglang:num_requests_total") - before == REQUESTS
