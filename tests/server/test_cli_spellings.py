"""Spellings of other servers, help by depth, and --print-config."""

from __future__ import annotations

from pathlib import Path

import pytest

from duograph.server.args import ServeConfig, options, parse_serve
from duograph.server.cli import main
from duograph.server.help import COMMON, group_names, help_text
from duograph.server.options import UsageError


def parse(*arguments: str) -> ServeConfig:
    return parse_serve(list(arguments), {})


@pytest.mark.parametrize(
    ("arguments", "owner", "field", "value"),
    [
        (["--max-model-len", "99"], "runner", "context_length", 99),
        (["--max_num_seqs=7"], "runner", "max_running_requests", 7),
        (["--max-num-batched-tokens", "64"], "runner", "chunked_prefill_size", 64),
        (["--gpu-memory-utilization", "0.9"], "runner", "mem_fraction_static", 0.9),
        (["--scheduling-policy", "priority"], "scheduler", "schedule_policy", "priority"),
        (["--enable-priority-scheduling"], "scheduler", "schedule_policy", "priority"),
        (["--no-enable-prefix-caching"], "scheduler", "disable_radix_cache", True),
        (["--no-async-scheduling"], "scheduler", "disable_overlap_schedule", True),
        (["--cuda-graph-max-bs-decode", "4"], "graph", "cuda_graph_max_bs", 4),
        (["--max-cudagraph-capture-size=4"], "graph", "cuda_graph_max_bs", 4),
        (["--cuda-graph-bs-decode", "1", "2"], "graph", "cuda_graph_bs", (1, 2)),
        (["--cudagraph-capture-sizes", "1", "2"], "graph", "cuda_graph_bs", (1, 2)),
        (["--cuda-graph-backend-decode", "disabled"], "graph", "disable_cuda_graph", True),
        (["--disable-decode-cuda-graph"], "graph", "disable_cuda_graph", True),
        (["--cuda-graph-max-bs-prefill", "8"], "graph", "piecewise_cuda_graph_max_tokens", 8),
        (["--cuda-graph-bs-prefill", "8"], "graph", "piecewise_cuda_graph_tokens", (8,)),
        (
            ["--cuda-graph-backend-prefill=disabled"],
            "graph",
            "disable_piecewise_cuda_graph",
            True,
        ),
        (["--enforce-eager"], "graph", "disable_cuda_graph", True),
        (["--enforce-eager"], "graph", "disable_piecewise_cuda_graph", True),
        (["-cc", '{"cudagraph_mode": "PIECEWISE"}'], "graph", "disable_cuda_graph", True),
        (
            ["--compilation-config", '{"cudagraph_capture_sizes": [1, 4]}'],
            "graph",
            "cuda_graph_bs",
            (1, 4),
        ),
    ],
)
def test_an_alias_is_honoured_with_one_note(
    arguments: list[str], owner: str, field: str, value: object
) -> None:
    config = parse(*arguments)
    owners = {"runner": config.runner, "scheduler": config.scheduler, "graph": config.runner.graph}
    assert getattr(owners[owner], field) == value
    assert len(config.notes) == 1 and config.notes[0].startswith("--")


@pytest.mark.parametrize(
    "flag",
    ["--enable-metrics", "--enable-cache-report", "--trust-remote-code", "--async-scheduling",
     "--max-prefill-tokens=5", "--stream-interval=3", "--cuda-graph-backend-decode=full"],
)  # fmt: skip
def test_what_has_no_counterpart_is_said_and_changes_nothing(flag: str) -> None:
    config = parse(flag)
    assert not config.origins
    assert len(config.notes) == 1 and "changes nothing" in config.notes[0]


def test_one_gpu_may_be_asked_for_in_every_spelling() -> None:
    for flag in ("--tp", "--tp-size", "--tensor-parallel-size"):
        assert not parse(flag, "1").notes
        with pytest.raises(UsageError, match=rf"{flag} must be 1"):
            parse(flag, "2")


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--tp"], "needs a value"),
        (["--cuda-graph-backend-decode", "piecewise"], "must be disabled, auto or full"),
        (["--compilation-config", "{"], "JSON object"),
        (["--compilation-config", '{"level": 3}'], "level = 3"),
        (["--compilation-config", '{"cudagraph_mode": "SOME"}'], "cudagraph_mode"),
        (["--cuda-graph-max-b", "3"], "did you mean --cuda-graph-max-bs"),
    ],
)
def test_what_cannot_be_honoured_is_refused(arguments: list[str], word: str) -> None:
    with pytest.raises(UsageError, match=word.replace("(", r"\(")):
        parse(*arguments)


def test_the_short_help_is_short_and_tells_how_to_go_on(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["serve", "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert len(text.splitlines()) < 45
    for word in ("--help=all", "--help=GROUP", "--help=FLAG", "--config", "--print-config"):
        assert word in text
    assert all(f"--{flag}" in text for flag in COMMON)


def test_the_groups_make_up_the_whole() -> None:
    known = options()
    names = group_names(known)
    assert {"model", "server", "memory", "decode", "prefill", "api", "observability", "debug"} == {
        *names
    }
    whole = help_text("all", known)
    parts = "\n".join(help_text(name, known) for name in names)
    assert sorted(parts.splitlines()) == sorted(whole.splitlines())


def test_help_of_one_flag_tells_all_of_it() -> None:
    text = help_text("--max_num_seqs", options())
    for word in (
        "--max-running-requests",
        "DUOGRAPH_MAX_RUNNING_REQUESTS",
        "at least 1",
        "--max-num-seqs",
    ):
        assert word in text
    assert "one of:" in help_text("log-level", options())
    assert "--no-disable-cuda-graph" in help_text("disable-cuda-graph", options())


def test_help_of_nothing_known_suggests(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--help=prefil"]) == 2
    assert "did you mean prefill" in capsys.readouterr().err


def test_print_config_can_be_read_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DUOGRAPH_MAX_QUEUE", "9")
    monkeypatch.setenv("DUOGRAPH_ADMIN_API_KEY", "secret")
    flags = ["--port", "5", "--cuda-graph-bs", "1", "2", "--api-key", "other-secret"]
    assert main(["serve", *flags, "--print-config"]) == 0
    text = capsys.readouterr().out
    by_key = {line.split(":")[0]: line for line in text.splitlines() if not line.startswith("#")}
    assert by_key["port"].endswith("# --port")
    assert by_key["max-queue"].endswith("# DUOGRAPH_MAX_QUEUE")
    assert by_key["host"].endswith("# default")
    assert by_key["context-length"].split("#")[1] == " left out"
    assert "secret" not in text and "admin-api-key: set by DUOGRAPH_ADMIN_API_KEY" in text
    file = tmp_path / "config.yaml"
    file.write_text(text)
    monkeypatch.delenv("DUOGRAPH_MAX_QUEUE")
    again = parse_serve(["--config", str(file)], {})
    assert (again.http.port, again.scheduler.max_queue) == (5, 9)
    assert again.runner.graph.cuda_graph_bs == (1, 2)
    keys = {option.flag for option in options()} - {"api-key", "admin-api-key"}
    assert keys == by_key.keys() - {""}


def test_print_config_refuses_what_serve_would_refuse(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--cuda-graph-bs", "9", "--cuda-graph-max-bs", "4"]
    assert main(["serve", *flags, "--print-config"]) == 2
    assert "--cuda-graph-bs" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("port: 1\nport: 2\n", "'port' is there twice"),
        ("port: 1\nport:\n", "'port' is there twice"),
        ("max_queue: 1\nmax-queue: 2\n", "max-queue twice"),
        ("model: a\nmodel-path: b\n", "model-path twice"),
        ("port: " + "[" * 3000, "nested too deeply"),
        ("max-queue: 3000000000\n", "between 1 and 2147483647"),
        ("cuda-graph-max-bs: 70000\n", "between 1 and 65536"),
    ],
)
def test_what_a_configuration_file_cannot_mean_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, named: str
) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(text)
    assert main(["serve", "--config", str(file), "--print-config"]) == 2
    error = capsys.readouterr().err
    assert named in error and str(file) in error and len(error.splitlines()) == 1


def test_a_plan_for_a_slip_of_the_keyboard_ends_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--gpu", "h200", "--cuda-graph-max-bs", "9" * 20]
    assert main(["plan", *flags]) == 2
    assert "--cuda-graph-max-bs must be between 1 and 65536" in capsys.readouterr().err


def test_a_benchmark_without_its_model_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "engine", "--model-path", "/does/not/exist"]) == 3
    assert capsys.readouterr().err.startswith("duograph bench engine: error: /does/not/exist")
    assert main(["bench", "soak", "/does/not/exist"]) == 1
    error = capsys.readouterr().err
    assert "exit code 3" in error and "/does/not/exist" in error
