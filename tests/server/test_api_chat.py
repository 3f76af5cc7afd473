"""The chat endpoint on the wire."""

from __future__ import annotations

from openai import OpenAI


def test_a_chat_is_answered_with_what_the_engine_gave(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "The quick fox"}]
    )
    # the scripted engine repeats the rendered prompt; its special tokens are skipped
    assert answer.choices[0].message.content == "user\nThe quick fox\nassistant\n"
    assert answer.choices[0].finish_reason == "stop"


def test_a_streamed_chat_is_the_same_text(client: OpenAI) -> None:
    stream = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "The quick fox"}], stream=True
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == "user\nThe quick fox\nassistant\n"
