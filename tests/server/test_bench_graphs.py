"""What the graphs' benchmark says of padding, and a run of it over recorded graphs."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest

from duograph.server.bench import graphs
from duograph.server.bench.graphs import count_between_marks
from duograph.server.bench.graphs_report import (
    PhaseFigures,
    Report,
    ReportError,
    SizeFigures,
    load,
    padding,
    save,
    table,
)
from duograph.server.options import UsageError
from duograph.tests.e2e.conftest import write_tiny_model


def figures(size: int, smallest: int, graph_ms: float, compiled: float | None) -> SizeFigures:
    return SizeFigures(
        size=size,
        smallest=smallest,
        eager_ms=4 * graph_ms,
        graph_ms=graph_ms,
        compiled_ms=compiled,
        operations=100 + size,
        graphs=1,
        capture_seconds=0.25,
        nbytes=2**21,
    )


SIZES = [figures(1, 1, 1.0, 0.875), figures(2, 2, 1.5, None), figures(6, 3, 2.5, None)]
REPORT = Report(
    model="toy",
    device="some GPU",
    backend="cuda",
    kv_tokens=128,
    phases=[PhaseFigures(phase="decode", sizes=SIZES, dropped=[8], compile_seconds=12.0)],
)


def test_padding_is_paid_by_all_but_the_exact_batch() -> None:
    # 3, 4, 5 and 6 rows run as 6; the line from 2 to 6 rows gives 1.75, 2.0, 2.25 and 2.5 ms
    cost = padding(SIZES, 2)
    assert cost.worst_share == pytest.approx(3 / 6)
    assert cost.worst_ms == pytest.approx(2.5 - 1.75)
    assert cost.mean_share == pytest.approx((3 + 2 + 1 + 0) / 4 / 6)
    assert cost.mean_ms == pytest.approx((0.75 + 0.5 + 0.25 + 0) / 4)
    exact = padding(SIZES, 1)
    assert (exact.worst_share, exact.worst_ms, exact.mean_share, exact.mean_ms) == (0, 0, 0, 0)


def test_below_the_smallest_size_only_the_share_is_known() -> None:
    cost = padding([figures(4, 1, 2.0, None)], 0)
    assert cost.worst_share == pytest.approx(3 / 4)
    assert cost.worst_ms == 0


def test_the_table_has_a_row_per_size_and_the_sums() -> None:
    rows = [row.split("|") for row in table(REPORT).splitlines()]
    row = next(row for row in rows if row[0].strip() == "1")
    assert [float(cell) for cell in row[1:6]] == [4.0, 1.0, 4.0, 0.875, 101]
    text = table(REPORT)
    assert "3 sizes, 3 graphs: 0.75 s, 6 MiB; no memory for [8]; compiled variant: 12.0 s" in text
    assert "save no time" not in text
    assert "save no time" in table(replace(REPORT, backend="recorded"))


def test_a_report_can_be_read_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(REPORT, tmp_path / "report.json")
    assert load(tmp_path / "report.json") == REPORT
    assert graphs.main(["--from-json", str(tmp_path / "report.json")]) == 0
    assert capsys.readouterr().out.strip() == table(REPORT)


@pytest.mark.parametrize("text", ["", "{}", '{"model": 1}'])
def test_a_file_that_is_no_report_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "report.json"
    path.write_text(text)
    with pytest.raises(ReportError, match=r"report\.json is no report"):
        load(path)
    with pytest.raises(UsageError, match="--from-json"):
        graphs.main(["--from-json", str(path)])


def test_the_missing_extra_is_named_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: None if name == "matplotlib" else find_spec(name, *rest),
    )
    with pytest.raises(UsageError, match=r"duograph\[bench\]"):
        graphs.main(["--model-path", str(tmp_path / "nothing"), "--png", "x.png"])


def test_the_picture_is_a_png(tmp_path: Path) -> None:
    save(REPORT, tmp_path / "report.json")
    picture = tmp_path / "graphs.png"
    assert graphs.main(["--from-json", str(tmp_path / "report.json"), "--png", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 10_000


def test_operations_are_counted_between_marks() -> None:
    names = ["early", "spin_kernel(long)", "a", "b", "void x::spin_kernel(long)", "c"]
    assert count_between_marks(names) == [2, 1]


@pytest.mark.slow
def test_recorded_graphs_are_measured_and_said_to_save_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "FLASHINFER_WORKSPACE_BASE"):
        monkeypatch.setenv(name, str(tmp_path / "artifacts"))  # back to what it was afterwards
    model = write_tiny_model(tmp_path / "tiny")
    flags = ["--model-path", str(model), "--device", "cpu", "--context-length", "256"]
    sizes = ["--decode-sizes", "1", "4", "--prefill-levels", "16", "32", "--rounds", "1"]
    assert graphs.main([*flags, *sizes, "--json", str(tmp_path / "graphs.json")]) == 0
    assert "save no time" in capsys.readouterr().out
    report = load(tmp_path / "graphs.json")
    assert report.backend == "recorded"
    decode, prefill = report.phases
    assert [(one.size, one.smallest) for one in decode.sizes] == [(1, 1), (4, 2)]
    assert [(one.size, one.smallest, one.graphs) for one in prefill.sizes] == [
        (16, 1, 3),  # two layers, so two split ops
        (32, 17, 3),
    ]
    for one in (*decode.sizes, *prefill.sizes):
        assert one.eager_ms > 0 and one.graph_ms > 0 and one.capture_seconds > 0
        assert one.operations > 20 and one.compiled_ms is None
