"""The llm command with a model of extra-openai-models.yaml."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from duograph.tests.clients.conftest import MODEL

LLM = Path(sys.executable).parent / "llm"
Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def llm(base_url: str, tmp_path: Path) -> Command:
    if not LLM.exists():
        pytest.skip("the llm command is not installed beside this Python")
    card = {
        "model_id": "smol",
        "model_name": MODEL,
        "api_base": base_url,
        "supports_schema": True,
        "supports_tools": True,
    }
    completion = {"model_id": "smol-text", "model_name": MODEL, "api_base": base_url}
    models = [card, completion | {"completion": True}]
    (tmp_path / "extra-openai-models.yaml").write_text(json.dumps(models))  # JSON is YAML

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        variables = os.environ | {
            "LLM_USER_PATH": str(tmp_path),
            "OPENAI_API_KEY": "none",
            "LLM_LOAD_PLUGINS": "",  # the default model's package is one, and needs a compiler
        }
        done = subprocess.run(
            [str(LLM), *arguments],
            env=variables, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done

    return run


def test_a_prompt_is_answered_with_its_usage(llm: Command) -> None:
    options = ["-m", "smol", "-o", "temperature", "0", "-o", "max_tokens", "16"]
    for stream in ([], ["--no-stream"]):
        done = llm("What is the capital of France?", "-u", *options, *stream)
        assert done.stdout.strip() == "The capital of France is Paris."
        assert re.search(r"Token usage: \d+ input, 8 output", done.stderr), done.stderr


def test_a_schema_is_kept(llm: Command) -> None:
    schema = "name, age int, mood: happy or sad"
    options = ["-m", "smol", "-o", "temperature", "0", "-o", "max_tokens", "200"]
    for stream in ([], ["--no-stream"]):
        answer = llm("Anna is 31 years old.", "--schema", schema, *options, *stream).stdout
        assert answer.lstrip().startswith("{")
        person = json.loads(answer)
        assert set(person) == {"name", "age", "mood"} and isinstance(person["age"], int)


def test_a_conversation_is_continued(llm: Command) -> None:
    options = ["-o", "temperature", "0", "-o", "max_tokens", "8"]
    llm("Say hello.", "-m", "smol", *options)
    assert llm("-c", "And again.", *options).stdout.strip()


def test_the_completion_form_goes_on_with_a_text(llm: Command) -> None:
    options = ["-m", "smol-text", "-o", "temperature", "0", "-o", "max_tokens", "4"]
    assert llm("1, 2, 3,", *options).stdout.startswith(" 4")


def test_tools_may_be_offered(llm: Command) -> None:
    options = ["-m", "smol", "-o", "temperature", "0", "-o", "max_tokens", "12"]
    for stream in ([], ["--no-stream"]):
        assert llm("Which version is it?", "-T", "llm_version", *options, *stream).stdout.strip()
