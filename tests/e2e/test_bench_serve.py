"""``duograph bench serve`` over a real process tree, at a size that proves nothing about speed."""

from __future__ import annotations

import json
import os
from pathlib import Path

import psutil
import pytest

from duograph.scheduler.exit_codes import ExitCode
from duograph.server.bench import serve as bench
from duograph.server.bench.server_tree import ServerTree
from duograph.tests.e2e.server_process import NO_GRAPHS, SOURCE_ROOT, ServerProcess

SMALL = ["--input-len", "8", "--output-len", "6", "--requests-per-stream", "2"]


@pytest.fixture(autouse=True)
def find_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{SOURCE_ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture
def config_only(tiny_model: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "config-only"
    folder.mkdir()
    (folder / "config.json").write_text((tiny_model / "config.json").read_text())
    return folder


def test_each_number_of_streams_gets_a_row(
    config_only: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rows.json"
    ours = ["--model-path", str(config_only), *SMALL, "--concurrency", "1", "3"]
    theirs = ["--", *NO_GRAPHS, "--frontend-workers", "2"]
    code = bench.main([*ours, "--json", str(path), *theirs])
    assert code == ExitCode.OK
    document = json.loads(path.read_text())
    assert document["workload"]["output_len"] == 6
    for row, streams in zip(document["rows"], (1, 3), strict=True):
        assert row["concurrency"] == streams and row["requests"] == 2 * streams
        assert row["errors"] == {}
        assert row["tokens_per_s"] == pytest.approx(row["requests"] * 6 / row["seconds"])
        assert 0 < row["engine_ttft_mean_ms"] < row["ttft_p99_ms"]
        assert 0 < row["ttft_p50_ms"] <= row["ttft_p99_ms"]
        assert row["itl_p50_ms"] <= row["itl_p99_ms"] <= row["itl_max_ms"]
        assert set(row["cpu_shares"]) == {"supervisor", "scheduler", "frontend 0", "frontend 1"}
        assert row["cpu_shares"]["scheduler"] > 0
    table = capsys.readouterr().out
    assert "scheduler" in table and table.count("\n") >= 4


def test_a_running_server_is_measured_at_its_url(
    server: ServerProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench.main(["--url", server.url, *SMALL, "--concurrency", "2"]) == ExitCode.OK
    assert "share of a core" in capsys.readouterr().out


def test_failed_requests_make_the_exit_code(
    server: ServerProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    too_long = ["--input-len", "8", "--output-len", "9999", "--requests-per-stream", "1"]
    assert bench.main(["--url", server.url, *too_long, "--concurrency", "1"]) != ExitCode.OK
    assert "status 400" in capsys.readouterr().err


def test_a_server_that_does_not_start_is_an_error_with_its_last_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = bench.main(["--model-path", str(tmp_path / "nothing"), *SMALL])
    error = capsys.readouterr().err
    assert code != ExitCode.OK
    assert "the server ended with exit code 3" in error and "there is no such file" in error


def test_a_server_that_dies_is_an_error(
    config_only: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trees: list[psutil.Process] = []
    find = ServerTree._find_members

    def find_and_remember(tree: ServerTree) -> dict[str, psutil.Process]:
        found = find(tree)
        trees.append(found["scheduler"])
        return found

    go = bench._Clients.go

    def go_without_engine(clients: bench._Clients) -> object:
        trees[0].kill()
        return go(clients)

    monkeypatch.setattr(ServerTree, "_find_members", find_and_remember)
    monkeypatch.setattr(bench._Clients, "go", go_without_engine)
    code = bench.main(["--model-path", str(config_only), *SMALL, "--", *NO_GRAPHS])
    assert code != ExitCode.OK
    error = capsys.readouterr().err
    assert "duograph bench serve: error: " in error and "Traceback" not in error
    assert not trees[0].is_running()
