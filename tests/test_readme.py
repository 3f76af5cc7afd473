"""The README names flags, files and exit codes that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from duograph.runners.config import DECODE_GROUP, PREFILL_GROUP
from duograph.scheduler.exit_codes import ExitCode
from duograph.server.args import options

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
# of the command itself, of `duograph plan` and `bench`, and of docker
OTHER_FLAGS = {"--help", "--config", "--print-config", "--gpu", "--cost-of-metrics"}
DOCKER_FLAGS = {"--target", "--build-arg", "--profile"}


def test_every_flag_in_the_readme_exists() -> None:
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", README))
    assert named - OTHER_FLAGS - DOCKER_FLAGS <= {f"--{option.flag}" for option in options()}


def test_every_graph_flag_is_in_the_readme() -> None:
    for option in options():
        if option.metadata["group"] in (DECODE_GROUP, PREFILL_GROUP):
            assert f"| `--{option.flag}" in README


def test_every_exit_code_is_in_the_readme() -> None:
    for code in ExitCode:
        assert f"\n| {int(code)} | " in README


def test_every_variable_in_the_readme_exists() -> None:
    named = set(re.findall(r"DUOGRAPH_[A-Z_]+", README))
    assert named <= {option.env for option in options()}


@pytest.mark.parametrize("path", sorted(set(re.findall(r"`([\w./]+/[\w./]*)`", README))))
def test_every_path_in_the_readme_exists(path: str) -> None:
    if path == "org/name" or path.startswith("/"):
        return  # an example of a hub id, and routes
    assert (ROOT / path).exists()
