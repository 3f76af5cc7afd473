"""langchain-openai: chat, stream, structured output and tools through ChatOpenAI."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.messages import AIMessageChunk, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, Field

from duograph.tests.clients.conftest import MODEL

PARIS = "The capital of France is Paris."


class Person(BaseModel):
    """A person."""

    name: str = Field(max_length=12)
    age: int = Field(ge=0, le=120)


@tool
def multiply(a: int, b: int) -> int:
    """The product of two numbers."""
    return a * b


@pytest.fixture
def chat(base_url: str) -> Any:
    def build(**options: Any) -> ChatOpenAI:
        settings: Any = {"temperature": 0, "max_retries": 0, "timeout": 120} | options
        return ChatOpenAI(model=MODEL, base_url=base_url, api_key="none", **settings)

    return build


def test_invoke_has_text_and_usage(chat: Any) -> None:
    answer = chat(max_tokens=16).invoke("What is the capital of France?")
    assert answer.content == PARIS
    assert answer.usage_metadata["output_tokens"] == 8
    assert answer.response_metadata["finish_reason"] == "stop"
    assert answer.response_metadata["model_name"] == MODEL


def test_a_stream_adds_up_and_brings_its_usage(chat: Any) -> None:
    total: AIMessageChunk | None = None
    pieces = 0
    for chunk in chat(max_tokens=16, stream_usage=True).stream("What is the capital of France?"):
        total = chunk if total is None else total + chunk
        pieces += bool(chunk.content)
    assert total is not None and total.content == PARIS and pieces > 1
    assert total.usage_metadata is not None and total.usage_metadata["output_tokens"] == 8


async def test_batches_run_at_the_same_time(chat: Any) -> None:
    answers = await chat(max_tokens=16).abatch(["What is the capital of France?"] * 4)
    assert [answer.content for answer in answers] == [PARIS] * 4


def test_logprobs_arrive(chat: Any) -> None:
    answer = chat(max_tokens=4, logprobs=True, top_logprobs=2).invoke("Say hello.")
    assert len(answer.response_metadata["logprobs"]["content"]) == 4


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
@pytest.mark.parametrize("strict", [True, None])
def test_structured_output_is_an_object(chat: Any, method: str, strict: bool | None) -> None:
    model = chat().with_structured_output(Person, method=method, strict=strict, include_raw=True)
    answer = model.invoke("Anna is 31 years old.")
    assert answer["parsing_error"] is None and isinstance(answer["parsed"], Person)


def test_json_mode_asks_for_an_object(chat: Any) -> None:
    model = chat(max_tokens=64).with_structured_output(method="json_mode", include_raw=True)
    raw = model.invoke('Answer with the JSON object {"answer": "yes"}.')["raw"]
    assert raw.content.startswith("{")


@pytest.mark.parametrize("choice", ["any", "multiply"])
def test_bound_tools_are_called_and_answered(chat: Any, choice: str) -> None:
    history: list[Any] = [SystemMessage("You may multiply."), HumanMessage("What is 6 times 7?")]
    asked = chat().bind_tools([multiply], tool_choice=choice, parallel_tool_calls=False)
    answer = asked.invoke(history)
    [call] = answer.tool_calls
    assert call["name"] == "multiply" and set(call["args"]) == {"a", "b"}
    assert not answer.invalid_tool_calls
    result = multiply.invoke(call)
    assert isinstance(result, ToolMessage)
    after = chat(max_tokens=8).bind_tools([multiply], tool_choice="none")
    assert after.invoke([*history, answer, result]).content


def test_a_streamed_call_is_put_together(chat: Any) -> None:
    total: Any = None
    model = chat().bind_tools([multiply], tool_choice="any", parallel_tool_calls=False)
    for chunk in model.stream("What is 6 times 7?"):
        total = chunk if total is None else total + chunk
    [call] = total.tool_calls
    assert set(call["args"]) == {"a", "b"}


def test_the_completion_class_works_too(base_url: str) -> None:
    model = OpenAI(
        model=MODEL, base_url=base_url, api_key="none", temperature=0, max_tokens=4, best_of=1
    )
    assert model.invoke("1, 2, 3,").startswith(" 4")
