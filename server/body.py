"""Reading a request's body within limits: JSON only, counted as it arrives, never idle for long,
and parsed strictly. Knows HTTP headers, bytes and JSON; knows no field."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from itertools import islice
from typing import Any

import orjson
from starlette.requests import Request

from duograph.server.errors import ApiError, quote

MAX_JSON_DEPTH = 64
# Strings, lists and objects of one body. Each becomes a Python object while every stream of the
# process waits: what MAX_MESSAGES of text parts need and some more, read in tenths of a second.
MAX_JSON_PARTS = 100_000
BODY_IDLE_S = 10.0  # without a byte
# A client that is still sending when the connection is closed sees a reset instead of the answer:
# so much more of a body that is too large is read and dropped before it.
DISCARD_BYTES = 64 * 1024 * 1024
DISCARD_S = 5.0


async def read_json_body(request: Request, max_bytes: int) -> bytes:
    """Raises ApiError 408, 413 or 415."""
    _check_headers(request)
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length[:20]) > max_bytes:
        await _discard(request, int(length[:20]))
        raise _too_large(max_bytes)
    parts: list[bytes] = []
    size = 0
    while True:
        try:
            async with asyncio.timeout(BODY_IDLE_S):
                message = await request.receive()
        except TimeoutError:
            raise ApiError(
                408, "The body did not arrive in time", headers={"connection": "close"}
            ) from None
        if message["type"] == "http.disconnect":
            raise ApiError(400, "The client left before the body was complete")
        part: bytes = message.get("body", b"")
        size += len(part)
        if size > max_bytes:
            await _discard(request)
            raise _too_large(max_bytes)
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)


async def _discard(request: Request, length: int = 0) -> None:
    """The rest of the body, unless it is too long for that or has not been begun."""
    if length > DISCARD_BYTES or "expect" in request.headers:
        return
    left = DISCARD_BYTES
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(DISCARD_S):
            while left > 0:
                message = await request.receive()
                if not message.get("more_body", False):
                    return
                left -= len(message["body"])


def _check_headers(request: Request) -> None:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, "The body must be sent with content-type: application/json")
    if request.headers.get("content-encoding", "identity").strip().lower() != "identity":
        raise ApiError(415, "Compressed bodies are not accepted")


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(
        413, f"The body is larger than {max_bytes} bytes", headers={"connection": "close"}
    )


_PART = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[\[{]', re.DOTALL)


def parse_object(body: bytes) -> dict[str, Any]:
    """A JSON object without NaN, duplicate keys, lone surrogates, deep nesting or very many
    parts; nulls at the top are left out. Raises ApiError 400."""
    openers = body.count(b"[") + body.count(b"{")
    _check_parts(body)
    try:
        document = orjson.loads(body)
        # Each key has a colon behind it, so with no more colons than keys none has been there
        # twice; else a text holds one, and the slower parser tells.
        if body.count(b":") != _count_keys(document, openers):
            json.loads(body, object_pairs_hook=_unique_keys)
    except RecursionError as error:
        raise ApiError(400, f"The body is nested deeper than {MAX_JSON_DEPTH}") from error
    except ValueError as error:
        reason = "" if not isinstance(error, _DuplicateKeyError) else f": {error}"
        raise ApiError(400, f"The body is not valid JSON{reason}") from error
    if not isinstance(document, dict):
        raise ApiError(400, "The body must be a JSON object")
    if openers > MAX_JSON_DEPTH:  # else it cannot be that deep
        _check_depth(document)
    return {name: value for name, value in document.items() if value is not None}


def _check_parts(body: bytes) -> None:
    """Before parsing, which is what costs."""
    # a string has two quotes; those within texts are told apart only where there are so many
    if body.count(b'"') // 2 + body.count(b"[") + body.count(b"{") <= MAX_JSON_PARTS:
        return
    parts = _PART.finditer(body)
    if next(islice(parts, MAX_JSON_PARTS, None), None) is not None:
        text = f"The body holds more than {MAX_JSON_PARTS} strings, lists and objects"
        raise ApiError(400, text)


def _count_keys(document: Any, openers: int) -> int:
    """Of all objects in it. Its text has ``openers`` opening brackets, so once that many values
    have been met there are no more, and a long list of numbers is not looked through."""
    count, met = 0, 1
    waiting = [document]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            count += len(value)
            value = value.values()
        if met < openers:
            inner = [item for item in value if type(item) is dict or type(item) is list]
            waiting += inner
            met += len(inner)
    return count


class _DuplicateKeyError(ValueError):
    pass


def _unique_keys(pairs: list[tuple[str, Any]]) -> None:
    if len(pairs) > 1:
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _DuplicateKeyError(f"the key {quote(key)} is there twice")
            seen.add(key)


def _check_depth(document: Any) -> None:
    level = [document]
    for _ in range(MAX_JSON_DEPTH):
        children = (v.values() if isinstance(v, dict) else v for v in level)
        level = [item for child in children for item in child if isinstance(item, (dict, list))]
        if not level:
            return
    raise ApiError(400, f"The body is nested deeper than {MAX_JSON_DEPTH}")
