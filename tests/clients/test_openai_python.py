"""The openai package: every call that programs make with it, its own types as the judge."""

from __future__ import annotations

import math
from collections.abc import Iterator
from enum import StrEnum
from typing import Any

import openai
import pytest
from pydantic import BaseModel, Field

from duograph.tests.clients.conftest import MODEL
from duograph.tests.e2e.server_process import ServerProcess


class Mood(StrEnum):
    happy = "happy"
    sad = "sad"


class Place(BaseModel):
    city: str = Field(max_length=12)
    mood: Mood


class GetWeather(BaseModel):
    """The weather of a city."""

    city: str = Field(max_length=12)
    days: int = Field(ge=1, le=9)


MESSAGES: Any = [{"role": "user", "content": "What is the capital of France?"}]
TOOL = openai.pydantic_function_tool(GetWeather)


@pytest.fixture(scope="module")
def client(smol: ServerProcess) -> Iterator[openai.OpenAI]:
    with smol.client() as client:
        yield client


def test_models_are_listed_and_found(client: openai.OpenAI) -> None:
    [card] = client.models.list().data
    assert card.id == MODEL and card.object == "model"
    found = client.models.retrieve(MODEL)
    assert found.id == MODEL and found.model_extra and found.model_extra["max_model_len"] == 8192
    with pytest.raises(openai.NotFoundError) as error:
        client.models.retrieve("gpt-9")
    assert error.value.code == "model_not_found"


def test_a_chat_has_its_answer_its_usage_and_its_request_id(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, temperature=0, max_completion_tokens=16
    )
    assert answer.choices[0].message.content == "The capital of France is Paris."
    assert answer.choices[0].finish_reason == "stop" and answer.id.startswith("chatcmpl-")
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.prompt_tokens_details is not None
    assert answer._request_id

    raw = client.chat.completions.with_raw_response.create(
        model=MODEL, messages=MESSAGES, max_tokens=1, extra_headers={"x-request-id": "mine-1"}
    )
    assert raw.request_id == "mine-1" and raw.parse().choices[0].finish_reason == "length"


def test_a_stream_says_the_same_and_ends_with_usage(client: openai.OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model=MODEL,
            messages=MESSAGES,
            temperature=0,
            max_tokens=16,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == "The capital of France is Paris."
    assert chunks[-1].choices == [] and chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 8


def test_the_stream_helper_builds_the_whole_answer(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        model=MODEL, messages=MESSAGES, temperature=0, response_format=Place
    ) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert isinstance(final.choices[0].message.parsed, Place)


def test_parse_gives_an_object_of_the_class(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(
        model=MODEL, messages=MESSAGES, response_format=Place, n=2, temperature=1.2, seed=3
    )
    for choice in answer.choices:
        assert isinstance(choice.message.parsed, Place)


def test_a_required_call_is_parsed_whole_and_streamed(client: openai.OpenAI) -> None:
    options: Any = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Weather in Paris for 3 days?"}],
        "tools": [TOOL],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "temperature": 0,
    }
    [whole] = client.chat.completions.parse(**options).choices[0].message.tool_calls or []
    assert isinstance(whole.function.parsed_arguments, GetWeather)
    with client.chat.completions.stream(**options) as stream:
        final = stream.get_final_completion().choices[0]
    [streamed] = final.message.tool_calls or []
    assert streamed.function.arguments == whole.function.arguments
    assert final.finish_reason == "tool_calls"


def test_a_conversation_with_a_called_tool_goes_on(client: openai.OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": "Weather in Paris for 3 days?"}]
    choice: Any = {"type": "function", "function": {"name": "GetWeather"}}
    options: Any = {"model": MODEL, "tools": [TOOL], "temperature": 0}
    asked = client.chat.completions.create(messages=messages, tool_choice=choice, **options)
    message = asked.choices[0].message
    assert message.tool_calls
    messages.append(message)  # as the package gives it, with its nulls
    messages += [
        {"role": "tool", "tool_call_id": call.id, "content": "sunny"} for call in message.tool_calls
    ]
    answer = client.chat.completions.create(
        messages=messages, tool_choice="none", max_tokens=8, **options
    )
    assert answer.choices[0].message.content and not answer.choices[0].message.tool_calls


def test_logprobs_belong_to_the_text(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, temperature=0, max_tokens=16, logprobs=True, top_logprobs=3
    ).choices[0]
    assert answer.logprobs is not None and answer.logprobs.content
    joined = b"".join(bytes(entry.bytes or []) for entry in answer.logprobs.content)
    assert answer.message.content is not None
    assert joined.decode().startswith(answer.message.content)
    for entry in answer.logprobs.content:
        assert len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].logprob == pytest.approx(entry.logprob, abs=1e-4)
        assert sum(math.exp(top.logprob) for top in entry.top_logprobs) <= 1.001


def test_completions_take_several_prompts_and_score_them(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL, prompt=["1, 2, 3,", "a, b, c,"], n=2, max_tokens=4, temperature=0
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.choices[0].text == answer.choices[1].text == " 4, "[: len(answer.choices[0].text)]
    scored = client.completions.create(
        model=MODEL, prompt="Paris is in France", max_tokens=0, echo=True, logprobs=2
    ).choices[0]
    assert scored.text == "Paris is in France" and scored.logprobs is not None
    assert scored.logprobs.tokens and "".join(scored.logprobs.tokens) == scored.text
    assert scored.logprobs.token_logprobs
    first, *others = scored.logprobs.token_logprobs
    assert first is None and all(value is not None and value < 0 for value in others)
    streamed = client.completions.create(
        model=MODEL, prompt="1, 2, 3,", max_tokens=4, temperature=0, stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in streamed) == answer.choices[0].text


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": 3}, "temperature"),
        ({"max_tokens": 100_000}, "messages"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"),
        ({"tools": [], "tool_choice": "required"}, "tool"),
        ({"messages": []}, "messages"),
    ],
)
def test_a_wrong_field_raises_the_error_of_the_package(
    client: openai.OpenAI, fields: dict[str, Any], param: str
) -> None:
    body: Any = {"model": MODEL, "messages": MESSAGES} | fields
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(**body)
    assert error.value.type == "invalid_request_error"
    assert (error.value.param or "").startswith(param) and error.value.request_id


async def test_the_async_client_asks_many_at_once(smol: ServerProcess) -> None:
    import asyncio

    async with openai.AsyncOpenAI(base_url=f"{smol.url}/v1", api_key="none") as client:
        answers = await asyncio.gather(
            *(
                client.chat.completions.create(
                    model="default", messages=MESSAGES, temperature=0, max_tokens=16
                )
                for _ in range(6)
            )
        )
    assert {a.choices[0].message.content for a in answers} == {"The capital of France is Paris."}
