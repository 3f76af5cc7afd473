"""Requests that /openapi.json shows for each route that takes a body: /docs offers them, and
tools that test or generate from the document send them as they are, so each has to be valid for
every model. Knows only JSON."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

Examples = Mapping[str, dict[str, Any]]

_MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]
_CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}},
    "required": ["city"],
    "additionalProperties": False,
}
_FUNCTION = {"name": "get_weather", "description": "The weather of a city.", "parameters": _CITY}

_CHAT: Examples = {
    "a question": {"messages": _MESSAGES, "max_tokens": 32, "temperature": 0},
    "a stream with usage": {
        "messages": _MESSAGES,
        "max_tokens": 32,
        "stream": True,
        "stream_options": {"include_usage": True},
    },
    "an answer that keeps a schema": {
        "messages": _MESSAGES,
        "max_tokens": 64,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "answer", "strict": True, "schema": _CITY},
        },
    },
    "a tool that has to be called": {
        "messages": _MESSAGES,
        "max_tokens": 64,
        "tools": [{"type": "function", "function": _FUNCTION}],
        "tool_choice": "required",
    },
    "log probabilities": {
        "messages": _MESSAGES,
        "max_tokens": 8,
        "logprobs": True,
        "top_logprobs": 2,
    },
}
_COMPLETION: Examples = {
    "a text that goes on": {"prompt": "1, 2, 3,", "max_tokens": 8, "temperature": 0},
    "the score of a text": {"prompt": "Paris is in France.", "max_tokens": 0, "echo": True,
                            "logprobs": 1},
}  # fmt: skip
_GENERATE: Examples = {
    "a text that goes on": {
        "text": "1, 2, 3,",
        "sampling_params": {"max_new_tokens": 8, "temperature": 0},
    },
    "several texts with log probabilities": {
        "text": ["Paris is", "Rome is"],
        "sampling_params": {"max_new_tokens": 8},
        "return_logprob": True,
    },
}
_TOKENIZE: Examples = {
    "a text": {"prompt": "Hello, world"},
    "a chat": {"messages": _MESSAGES},
}
_DETOKENIZE: Examples = {"some ids": {"tokens": [1, 2, 3]}}

# By path: what to send.
EXAMPLES: Mapping[str, Examples] = MappingProxyType(
    {
        "/v1/chat/completions": _CHAT,
        "/v1/completions": _COMPLETION,
        "/generate": _GENERATE,
        "/invocations": {
            "a chat": _CHAT["a question"],
            "a text": _COMPLETION["a text that goes on"],
        },
        "/tokenize": _TOKENIZE,
        "/v1/tokenize": _TOKENIZE,
        "/detokenize": _DETOKENIZE,
        "/v1/detokenize": _DETOKENIZE,
        "/abort_request": {"one request by its id": {"rid": "my-request"}},
    }
)
