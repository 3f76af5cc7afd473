"""Where the seconds of a start go: the parts add up, and come from the engine and the log."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from duograph.server.artifact_cache import FOLDER
from duograph.server.bench import startup
from duograph.server.bench.startup import (
    FIRST_REQUEST,
    REST,
    SUPERVISOR,
    count_files,
    explain,
    log_moments,
    table,
)
from duograph.tests.e2e.conftest import write_tiny_model

SOURCE = str(Path(__file__).resolve().parents[2] / ".src")


def line(moment: float, message: str) -> str:
    return json.dumps({"time": moment, "level": "info", "message": message})


LOG = [
    line(10.5, "Listening on http://127.0.0.1:1234"),
    "a library prints this",
    "17",
    line(13.0, "Engine ready"),
    line(13.2, "The server is fired up and ready to roll!"),
]
CAPTURED = {
    "start_seconds": {"process": 1.5, "capture_decode": 0.75},
    "decode": {"sizes": {"1": {}, "2": {}}},
    "prefill": {"sizes": {"16": {}}},
    "compiles": {"triton_compiled": 3, "triton_cached": 4, "triton_compile_seconds": 1.25},
}


def test_stages_and_the_unexplained_rest_add_up_to_the_whole() -> None:
    start = explain(CAPTURED, log_moments(LOG), 10.0, cache="cold", cache_files=9)
    assert start.total == pytest.approx(3.2)
    assert sum(start.seconds.values()) == pytest.approx(start.total)
    assert start.seconds[SUPERVISOR] == pytest.approx(0.5)
    assert start.seconds[FIRST_REQUEST] == pytest.approx(0.2)
    assert start.seconds[REST] == pytest.approx(3.2 - 0.5 - 1.5 - 0.75 - 0.2)
    assert (start.decode_sizes, start.prefill_levels) == (2, 1)


def test_a_log_without_the_ready_line_is_an_error_that_says_so() -> None:
    with pytest.raises(ValueError, match="when it was engine, ready"):
        log_moments(LOG[:1])


def test_the_table_has_a_row_per_stage_and_names_what_was_compiled() -> None:
    start = explain(CAPTURED, log_moments(LOG), 10.0, cache="cold", cache_files=9)
    text = table([start])
    rows = {row.split("|")[0].strip(): row for row in text.splitlines()}
    assert float(rows["capture_decode"].split("|")[1]) == 0.75
    assert float(rows["ready"].split("|")[1]) == 3.2
    assert "3 Triton kernels compiled in 1.2 s, 4 from the cache; 9 cache files" in text


def test_only_files_of_compiled_code_are_counted(tmp_path: Path) -> None:
    kernel = tmp_path / "duograph" / FOLDER / "triton" / "HASH" / "kernel.cubin"
    kernel.parent.mkdir(parents=True)
    kernel.write_bytes(b"")
    (tmp_path / "duograph" / "models").mkdir()
    (tmp_path / "duograph" / "models" / "config.json").write_text("{}")
    assert count_files(tmp_path) == 1


@pytest.mark.slow
def test_a_real_tree_is_explained_almost_to_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", SOURCE + os.pathsep + os.environ.get("PYTHONPATH", ""))
    model_folder = write_tiny_model(tmp_path / "tiny")
    report = tmp_path / "startup.json"
    flags = ["--model-path", str(model_folder), "--starts", "1", "--json", str(report)]
    serve = ["--", "--frontend-workers", "1", "--disable-piecewise-cuda-graph"]
    assert startup.main([*flags, *serve, "--cuda-graph-bs", "1", "2"]) == 0
    [start] = json.loads(report.read_text())["starts"]
    assert start["decode_sizes"] == 2 and start["prefill_levels"] == 0
    assert sum(start["seconds"].values()) == pytest.approx(start["total"])
    # spawning the engine and hearing of it: little, also on a busy machine
    assert abs(start["seconds"][REST]) < 0.2 * start["total"]


def test_a_model_that_is_not_there_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert startup.main(["--model-path", str(tmp_path / "nothing")]) != 0
    assert "nothing/config.json" in capsys.readouterr().err
