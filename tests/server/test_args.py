"""The command line: sources and their precedence, spellings, and refusals in one sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from duograph.kernels.attention import flashinfer_tools
from duograph.server.arg_checks import check_together
from duograph.server.args import ServeConfig, options, parse_serve
from duograph.server.cli import main
from duograph.server.help import help_text
from duograph.server.options import UsageError


def parse(line: str, **environ: str) -> ServeConfig:
    return parse_serve(line.split(), environ)


def refusal(line: str, **environ: str) -> str:
    with pytest.raises(UsageError) as caught:
        check_together(parse(line, **environ))
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_nothing_given_is_all_defaults() -> None:
    config = parse("")
    assert config.runner.model_path == ""
    assert (config.http.host, config.http.port) == ("127.0.0.1", 30000)
    assert config.scheduler.schedule_policy == "fcfs"
    assert not config.origins and not config.notes
    assert check_together(config) == []


def test_every_promised_flag_exists() -> None:
    wanted = """model-path served-model-name host port dtype device load-format context-length
    mem-fraction-static max-running-requests max-total-tokens chunked-prefill-size page-size
    schedule-policy disable-radix-cache disable-overlap-schedule attention-backend
    prefill-attention-backend decode-attention-backend
    cuda-graph-max-bs cuda-graph-bs disable-cuda-graph disable-cuda-graph-padding
    piecewise-cuda-graph-max-tokens piecewise-cuda-graph-tokens disable-piecewise-cuda-graph
    piecewise-cuda-graph-compiler enable-torch-compile torch-compile-max-bs api-key
    log-level""".split()
    assert set(wanted) <= {option.flag for option in options()}


def test_every_option_is_in_the_help_with_its_variable() -> None:
    text = help_text("all", options())
    for option in options():
        assert f"--{option.flag}" in text
        assert f"[{option.env}]" in "".join(text.split())
        assert option.env in help_text(option.flag, options())
    for group in ("Model", "Server", "Memory & scheduling", "API", "Observability", "Debug"):
        assert f"{group}:\n" in text


def test_variables_are_distinct_and_none_is_one_that_kubernetes_injects() -> None:
    names = [option.env for option in options()]
    assert len(set(names)) == len(names)
    assert "DUOGRAPH_PORT" not in names


def test_command_line_beats_environment_beats_file_beats_default(tmp_path: Path) -> None:
    file = tmp_path / "duograph.yaml"
    file.write_text("port: 1\nhost: 127.0.0.2\nmax_queue: 7\nlog-level: error\n")
    environ = {"DUOGRAPH_HTTP_PORT": "2", "DUOGRAPH_HOST": "127.0.0.3"}
    config = parse_serve(["--config", str(file), "--port", "3"], environ)
    assert config.http.port == 3
    assert config.http.host == "127.0.0.3"
    assert config.scheduler.max_queue == 7
    assert config.http.log_level == "error"
    assert config.http.shutdown_timeout == 30.0
    assert config.origins["port"] == "--port"
    assert config.origins["host"] == "DUOGRAPH_HOST"
    assert "max_queue" in config.origins["max_queue"] and str(file) in config.origins["max_queue"]


def test_the_file_may_be_named_by_a_variable_and_may_be_toml(tmp_path: Path) -> None:
    file = tmp_path / "duograph.toml"
    file.write_text('cuda-graph-bs = [1, 2, 4]\ndisable-radix-cache = true\nmodel = "m"\n')
    config = parse("", DUOGRAPH_CONFIG=str(file))
    assert config.runner.graph.cuda_graph_bs == (1, 2, 4)
    assert config.scheduler.disable_radix_cache
    assert config.runner.model_path == "m"


def test_a_switch_can_be_turned_off_again() -> None:
    config = parse("--no-disable-cuda-graph", DUOGRAPH_DISABLE_CUDA_GRAPH="yes")
    assert config.runner.graph.disable_cuda_graph is False
    assert parse("", DUOGRAPH_DISABLE_CUDA_GRAPH="1").runner.graph.disable_cuda_graph is True
    assert parse("", DUOGRAPH_DISABLE_CUDA_GRAPH="").runner.graph.disable_cuda_graph is False


@pytest.mark.parametrize(
    "line",
    ["--cuda-graph-bs 1 2 8", "--cuda_graph_bs 1 2 8", "--cuda-graph-bs 1,2,8"],
)
def test_underscores_dashes_and_commas(line: str) -> None:
    assert parse(line).runner.graph.cuda_graph_bs == (1, 2, 8)


def test_underscores_of_values_stay() -> None:
    assert parse("--served_model_name=my_model").http.served_model_name == ("my_model",)


def test_model_has_three_spellings() -> None:
    for line in ("a/b", "--model a/b", "--model-path a/b", "--model_path=a/b"):
        assert parse(line).runner.model_path == "a/b"
        assert parse(line).notes == ()
    assert "differ" in refusal("a --model-path b")


def test_other_servers_spellings_work_and_are_pointed_out() -> None:
    config = parse("--max-model-len 128 --enforce-eager")
    assert config.runner.context_length == 128
    assert config.runner.graph.disable_cuda_graph
    assert config.runner.graph.disable_piecewise_cuda_graph
    assert "--max-model-len is an alias of --context-length" in config.notes
    assert len(config.notes) == 2


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        ("--cuda-graph-max-b 3", ["--cuda-graph-max-b", "did you mean --cuda-graph-max-bs?"]),
        ("--prot 3", ["unknown flag --prot", "--port"]),
        ("--qqqqqqqq", ["unknown flag --qqqqqqqq"]),
        ("one two", ["two"]),
        ("--port 70000", ["--port must be between 0 and 65535, got 70000"]),
        ("--port x", ["--port must be a whole number, got 'x'"]),
        ("--port 1.5", ["--port must be a whole number"]),
        ("--port", ["--port"]),
        ("--max-queue 0", ["--max-queue must be at least 1, got 0"]),
        ("--mem-fraction-static nan", ["--mem-fraction-static must be finite"]),
        ("--mem-fraction-static 1.5", ["--mem-fraction-static must be between 0.01 and 0.99"]),
        ("--cuda-graph-bs 4 0", ["--cuda-graph-bs must be between 1 and 65536, got 0"]),
        ("--cuda-graph-bs 4 x", ["--cuda-graph-bs must be a whole number, got 'x'"]),
        ("--dtype bfloat", ["--dtype must be one of", "did you mean bfloat16?"]),
        ("--cuda-graph-bs 8 --cuda-graph-max-bs 4", ["--cuda-graph-bs has 8", "-max-bs 4"]),
        ("--cuda-graph-bs 8 --max-running-requests 4", ["--cuda-graph-bs has 8", "requests 4"]),
        (
            "--piecewise-cuda-graph-tokens 64 --chunked-prefill-size 32",
            ["--piecewise-cuda-graph-tokens has 64", "--chunked-prefill-size 32"],
        ),
        ("--max-total-tokens 8", ["--max-total-tokens 8", "--page-size 16"]),
        ("--attention-backend triton --device cpu", ["--attention-backend", "--device"]),
        (
            "--decode-attention-backend flashinfer --device cpu",
            ["--decode-attention-backend flashinfer", "--device is cpu"],
        ),
        ("--host=", ["--host must not be empty"]),
        ("--config /does/not/exist.yaml", ["--config", "/does/not/exist.yaml"]),
    ],
)
def test_a_wrong_command_line_is_one_sentence_that_names_the_flag(
    line: str, parts: list[str]
) -> None:
    message = refusal(line)
    for part in parts:
        assert part in message


def test_a_wrong_variable_is_named() -> None:
    assert "DUOGRAPH_HTTP_PORT must be" in refusal("", DUOGRAPH_HTTP_PORT="-1")
    assert "DUOGRAPH_DISABLE_CUDA_GRAPH" in refusal("", DUOGRAPH_DISABLE_CUDA_GRAPH="perhaps")


def test_a_nearly_right_variable_is_pointed_out_and_a_foreign_one_is_not() -> None:
    config = parse("", DUOGRAPH_MAX_QUEU="3", DUOGRAPH_PORT_30000_TCP_PROTO="tcp")
    assert config.notes == (
        "the variable DUOGRAPH_MAX_QUEU has no meaning (did you mean DUOGRAPH_MAX_QUEUE?)",
    )


@pytest.mark.parametrize(
    ("content", "part"),
    [
        ("prot: 3\n", "unknown key 'prot' (did you mean port?)"),
        ("port: true\n", "must be a whole number"),
        ("port: [1]\n", "takes one value"),
        ("port: 1.5\n", "must be a whole number"),
        ("max-total-tokens: {a: 1}\n", "takes one value"),
        ("cuda-graph-bs: []\n", "at least one value"),
        ("- port\n", "mapping"),
        ("port: [\n", "cannot be parsed"),
    ],
)
def test_a_wrong_file_is_one_sentence_that_names_key_and_file(
    tmp_path: Path, content: str, part: str
) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(content)
    message = refusal(f"--config {file}")
    assert part in message and str(file) in message


def test_an_empty_file_and_nulls_change_nothing(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("")
    assert parse(f"--config {file}").origins == {}
    file.write_text("port: null\n")
    assert parse(f"--config {file}").origins == {}


@pytest.mark.parametrize(
    ("line", "flags"),
    [
        ("--disable-cuda-graph --cuda-graph-bs 1", ["--cuda-graph-bs", "--disable-cuda-graph"]),
        (
            "--disable-piecewise-cuda-graph --piecewise-cuda-graph-max-tokens 64",
            ["--piecewise-cuda-graph-max-tokens", "--disable-piecewise-cuda-graph"],
        ),
        ("--torch-compile-max-bs 3", ["--torch-compile-max-bs", "--enable-torch-compile"]),
        ("--host 0.0.0.0", ["--host 0.0.0.0", "--api-key"]),
    ],
)
def test_a_flag_without_effect_is_pointed_out(line: str, flags: list[str]) -> None:
    (warning,) = check_together(parse(line))
    for flag in flags:
        assert flag in warning


@pytest.mark.parametrize("key", ["", "has space", "ümlaut", "tab\there"])
def test_a_key_that_cannot_be_a_header_is_refused_without_being_shown(key: str) -> None:
    with pytest.raises(UsageError) as caught:
        check_together(parse_serve([f"--api-key={key}"], {}))
    assert "--api-key" in str(caught.value)
    assert not key or key not in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["serve", "--prot", "1"], "did you mean --port?"),
        (["srve"], "did you mean serve?"),
        (["version", "x"], "takes no arguments"),
    ],
)
def test_the_command_exits_2_with_one_line(
    arguments: list[str], part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1 and part in captured.err


def test_flashinfer_by_flag_needs_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    line = "--prefill-attention-backend flashinfer"
    monkeypatch.setattr(flashinfer_tools, "is_installed", lambda: True)
    assert check_together(parse(line)) == []
    monkeypatch.setattr(flashinfer_tools, "is_installed", lambda: False)
    with pytest.raises(UsageError, match=r"^--prefill-\S+ flashinfer: flashinfer-python is not"):
        check_together(parse(line))
    assert check_together(parse("--attention-backend auto")) == []  # goes on without


def test_version_and_help_need_no_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["version"]) == 0
    assert "torch" in capsys.readouterr().out
    assert main(["--help"]) == 0
    assert "check-env" in capsys.readouterr().out
