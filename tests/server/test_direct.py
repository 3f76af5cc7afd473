"""The routes that bypass the framework: what they answer, and what they leave to it."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from duograph.server.direct import DirectRoutes
from duograph.server.errors import ApiError


async def framework(scope: Scope, receive: Receive, send: Send) -> None:
    await Response(b"framework")(scope, receive, send)


async def good(request: Request) -> Response:
    return Response(b"direct")


async def refusing(request: Request) -> Response:
    raise ApiError(418, "no", headers={"retry-after": "1"})


async def broken(request: Request) -> Response:
    raise ZeroDivisionError


APP = DirectRoutes(framework, {"/good": good, "/refusing": refusing, "/broken": broken})


def ask(method: str, path: str) -> list[Message]:
    sent: list[Message] = []
    scope = {"type": "http", "method": method, "path": path, "headers": []}

    async def receive() -> Message:
        raise AssertionError("nobody asked for the body")

    async def send(message: Message) -> None:
        sent.append(message)

    asyncio.run(APP(scope, receive, send))
    return sent


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/good", b"direct"),
        ("GET", "/good", b"framework"),
        ("PUT", "/good", b"framework"),
        ("POST", "/good/", b"framework"),
        ("POST", "/other", b"framework"),
    ],
)
def test_posts_to_the_named_paths_alone_are_direct(method: str, path: str, body: bytes) -> None:
    assert ask(method, path)[1]["body"] == body


def test_a_refusal_is_the_envelope_with_its_headers() -> None:
    head, body = ask("POST", "/refusing")
    headers: list[tuple[bytes, bytes]] = head["headers"]
    answer: dict[str, Any] = orjson.loads(body["body"])
    assert head["status"] == 418
    assert (b"retry-after", b"1") in headers
    assert (b"content-type", b"application/json") in headers
    assert answer["error"]["message"] == "no"


def test_any_other_error_is_left_to_whoever_logs_it() -> None:
    with pytest.raises(ZeroDivisionError):
        ask("POST", "/broken")
