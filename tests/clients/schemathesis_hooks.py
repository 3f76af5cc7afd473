"""Hooks of schemathesis: answers stay short, because a small model on a CPU writes some fifteen
tokens a second. What schemathesis made wrong on purpose stays as wrong as it was."""

from __future__ import annotations

from typing import Any

import schemathesis

TOKENS = 2
LIMITS = ("max_tokens", "max_completion_tokens")


@schemathesis.hook
def before_call(
    context: schemathesis.HookContext, case: schemathesis.Case, kwargs: dict[str, Any]
) -> None:
    body = case.body
    if not isinstance(body, dict):
        return
    path = case.operation.path
    if path in ("/v1/chat/completions", "/v1/completions", "/invocations"):
        _shorten(body, LIMITS)
    if path in ("/generate", "/invocations"):
        if body.get("sampling_params") is None:
            body["sampling_params"] = {}
        sampling = body["sampling_params"]
        for one in sampling if isinstance(sampling, list) else [sampling]:
            if isinstance(one, dict):
                _shorten(one, ("max_new_tokens",))


def _shorten(fields: dict[str, Any], limits: tuple[str, ...]) -> None:
    for name in limits:
        value = fields.get(name)
        if value is None or (type(value) is int and value > TOKENS):
            fields[name] = TOKENS
