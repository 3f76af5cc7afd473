"""The in-process benchmarks, on a tiny model: every line they promise, from one engine."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from duograph.server.bench import main
from duograph.tests.e2e.conftest import write_tiny_model


@pytest.mark.slow
def test_one_engine_gives_the_figures_of_decode_prefill_and_offline(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_tiny_model(tmp_path / "model")
    flags = ["--device", "cpu", "--context-length", "256", "--disable-piecewise-cuda-graph"]
    few = ["--batch-sizes", "1", "2", "--lengths", "16", "32", "--requests", "3"]
    lengths = ["--min-len", "5", "--max-len", "9"]
    arguments = ["--model-path", str(model), *flags, *few, *lengths]

    assert main(["engine", *arguments]) == 0

    lines = capsys.readouterr().out.splitlines()
    rows = [line.split("|") for line in lines if re.match(r" *\d+ \|", line)]
    assert [int(row[0]) for row in rows] == [1, 2, 16, 32]
    assert all(float(row[1].split("(")[0]) > 0 for row in rows)
    offline = re.search(r"3 requests, (\d+) prompt and (\d+) output tokens", "\n".join(lines))
    assert offline is not None
    assert all(15 <= int(count) <= 27 for count in offline.groups())
