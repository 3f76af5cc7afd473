"""``duograph plan``: what it says is what a start on that card would resolve to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from duograph.runners.buckets import get_batch_sizes_to_capture, get_token_levels_to_capture
from duograph.runners.request_table import RequestTable
from duograph.server.cli import main
from duograph.server.plan import CARDS

MODELS = Path(__file__).parents[1] / "benchmarks" / "models"
GIB = 1 << 30


def plan(capsys: pytest.CaptureFixture[str], *flags: str, model: str = "llama-1b") -> Any:
    code = main(["plan", str(MODELS / model), "--json", *flags])
    captured = capsys.readouterr()
    assert code == 0, captured.err
    return json.loads(captured.out)


def test_the_lists_are_those_of_a_start(capsys: pytest.CaptureFixture[str]) -> None:
    found = plan(capsys, "--gpu", "h200")
    assert found["max_running_requests"] == 256 and found["chunked_prefill_size"] == 8192
    assert found["decode_sizes"] == list(get_batch_sizes_to_capture(256))
    assert found["prefill_levels"] == list(get_token_levels_to_capture(8192))


def test_flags_of_serve_count(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--cuda-graph-bs", "1", "4", "--disable-piecewise-cuda-graph", "--max-num-seqs", "4")
    found = plan(capsys, "--gpu", "l4", *flags)
    assert (found["decode_sizes"], found["prefill_levels"]) == ([1, 4], [])
    assert found["memory"]["prefill_graphs"] == 0 < found["memory"]["decode_graphs"]


def test_the_parts_make_up_the_card(capsys: pytest.CaptureFixture[str]) -> None:
    memory = plan(capsys, "--gpu-memory", "24", model="llama-8b")["memory"]
    parts = ("weights", "tables", "activations", "decode_graphs", "prefill_graphs", "reserve",
             "kv_pool")  # fmt: skip
    assert memory["total"] == 24 * GIB
    page = 64 * memory["bytes_per_token"]
    left = memory["total"] - sum(memory[part] for part in parts)
    assert -page <= left < page, "but for the dummy page"
    assert memory["weights"] == 2 * 8_030_261_248
    assert memory["bytes_per_token"] == 2 * 32 * 8 * 128 * 2
    assert memory["kv_tokens"] == (memory["pages"] - 1) * 64


def test_the_tables_are_as_large_as_the_real_ones(capsys: pytest.CaptureFixture[str]) -> None:
    found = plan(capsys, "--gpu", "l4", "--max-num-seqs", "8", "--context-length", "4096")
    table = RequestTable(
        max_running_requests=8, max_pages=64, vocab_size=128256, device=torch.device("cpu")
    )
    rotary = 4 * 4096 * 64
    assert found["memory"]["tables"] == table.nbytes + rotary


def test_the_predictions_are_near_a_start_that_was_measured(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """llama-1b on one H200, defaults but for the context."""
    memory = plan(capsys, "--gpu", "h200", "--context-length", "16384")["memory"]
    assert memory["activations"] / GIB == pytest.approx(0.22, rel=0.25)
    assert memory["prefill_graphs"] / GIB == pytest.approx(0.51, rel=0.25)
    # alone; after prefill's they took 0.03, as they find most of it in the shared pool
    assert 0.03 < memory["decode_graphs"] / GIB < 0.14
    assert memory["kv_tokens"] == 4_194_304


def test_a_share_and_a_fixed_pool_are_honoured(capsys: pytest.CaptureFixture[str]) -> None:
    small = plan(capsys, "--gpu", "h200", "--mem-fraction-static", "0.1")["memory"]
    assert small["weights"] + small["kv_pool"] < 0.1 * small["total"]
    fixed = plan(capsys, "--gpu", "h200", "--max-total-tokens", "6400")["memory"]
    assert (fixed["pages"], fixed["kv_tokens"]) == (101, 6400)


def test_a_model_that_does_not_fit_is_an_out_of_memory(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(MODELS / "llama-8b"), "--gpu", "t4"]) == 4
    said = capsys.readouterr().err
    assert "T4" in said and "8,030,261,248 parameters" in said


def test_the_report_says_what_is_a_prediction(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(MODELS / "llama-1b"), "--gpu", "h100"]) == 0
    text = capsys.readouterr().out
    for part in ("activations", "decode graphs", "prefill graphs"):
        [line] = [line for line in text.splitlines() if line.strip().startswith(part)]
        assert "prediction" in line
    assert "exact" in text and "1,235,814,400 parameters" in text


def test_the_cpu_has_lists_and_no_card(capsys: pytest.CaptureFixture[str]) -> None:
    found = plan(capsys, "--device", "cpu")
    assert found["memory"] is None
    assert found["decode_sizes"] == list(get_batch_sizes_to_capture(32, device_type="cpu"))


@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        (["--gpu", "h2000"], 2, "did you mean h200"),
        (["--gpu", "h200", "--gpu-memory", "9"], 2, "both given"),
        (["--gpu-memory", "many"], 2, "--gpu-memory"),
        (["--gpu-memory", "-3"], 2, "--gpu-memory"),
        (["--gpu", "h200", "--cuda-graph-max-b", "3"], 2, "unknown flag"),
        (["--gpu", "h200", "--context-length", "999999999"], 2, "--context-length"),
    ],
)
def test_wrong_flags(
    flags: list[str], code: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(MODELS / "llama-1b"), *flags]) == code
    assert words in capsys.readouterr().err


def test_without_a_gpu_one_must_be_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["plan", str(MODELS / "llama-1b")]) == 2
    assert "--gpu-memory" in capsys.readouterr().err


def test_a_model_that_is_not_there(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["plan", str(tmp_path / "none"), "--gpu", "h200"]) == 3
    assert main(["plan", "--help"]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in CARDS)
