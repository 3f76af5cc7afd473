"""``duograph serve`` with no argument at all: the default model, both graph runners, real text."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from duograph.tests.e2e.server_process import ServerProcess

pytestmark = [pytest.mark.slow, pytest.mark.model]

NAME = "SmolLM2-135M-Instruct"
LIMITS_LINE = (
    r"max_total_num_tokens=\d+, chunked_prefill_size=\d+, max_prefill_tokens=\d+, "
    r"max_running_requests=\d+, context_len=8192, available_gpu_mem=\d+\.\d\d GB"
)


@pytest.fixture(scope="module")
def smol(
    default_model_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    """The folder is in the user's cache already, so nothing is fetched."""
    with ServerProcess(["--port", "0"], tmp_path_factory.mktemp("smol")) as server:
        yield server.wait_ready()
        assert server.stop() == 0, server.log()
        server.assert_nothing_left()


@pytest.fixture
def smol_client(smol: ServerProcess) -> Iterator[openai.OpenAI]:
    with smol.client() as client:
        yield client


def ask(client: openai.OpenAI, text: str, **options: Any) -> Any:
    messages: Any = [{"role": "user", "content": text}]
    return client.chat.completions.create(
        model=NAME, messages=messages, temperature=0, max_tokens=32, **options
    )


def test_a_question_gets_its_answer(smol_client: openai.OpenAI) -> None:
    answer = ask(smol_client, "What is the capital of France?")
    assert answer.choices[0].message.content == "The capital of France is Paris."
    assert answer.choices[0].finish_reason == "stop"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (37, 8)


def test_a_text_goes_on(smol_client: openai.OpenAI) -> None:
    answer = smol_client.completions.create(
        model="default", prompt="1, 2, 3, 4, 5,", max_tokens=16, temperature=0
    )
    assert answer.choices[0].text == " 6, 7, 8, 9, 10,"
    assert answer.usage is not None and answer.usage.prompt_tokens == 14


def test_text_beyond_ascii_is_streamed_whole(smol_client: openai.OpenAI) -> None:
    options: Any = {
        "model": NAME,
        "prompt": "The Japanese word for Japan is 日本. " * 2 + "The Japanese word for Japan is",
        "max_tokens": 16,
        "temperature": 0,
    }
    whole = smol_client.completions.create(**options).choices[0].text
    chunks = smol_client.completions.create(stream=True, **options)
    pieces = [chunk.choices[0].text for chunk in chunks]
    assert "".join(pieces) == whole
    assert whole.startswith(" 日本.")  # several tokens a character
    assert all("\ufffd" not in piece for piece in pieces)


def test_every_step_ran_as_a_graph(smol: ServerProcess, smol_client: openai.OpenAI) -> None:
    ask(smol_client, "Say hello.")
    smol.settled_metric("sglang:generation_tokens_total")
    assert smol.metric("duograph_graph_replays_total") > 0
    page = smol.get("/metrics")[1]
    eager = [line for line in page.splitlines() if line.startswith("duograph_graph_eager_total{")]
    assert sum(float(line.rsplit(" ", 1)[1]) for line in eager) == 0, eager


def test_the_words_that_scripts_wait_for_are_printed(smol: ServerProcess) -> None:
    log = smol.log()
    expected = [
        "Load weight begin. avail mem=",
        "Loading safetensors checkpoint shards",
        "Load weight end. elapsed=",
        "KV Cache is allocated. #tokens: ",
        "Memory pool end. avail mem=",
        "Capture cuda graph begin.",
        "Capture cuda graph bs [1, 2, 4,",
        "Capture cuda graph end. Time elapsed: ",
        "Capture piecewise CUDA graph begin.",
        "Capture piecewise CUDA graph end. Time elapsed: ",
        "Prefill batch, #new-seq: 1, #new-token: ",
        "The server is fired up and ready to roll!",
    ]
    assert [line for line in expected if line not in log] == []
    assert re.search(LIMITS_LINE, log)
    assert "\r" not in log  # no progress bar without a terminal
