"""Reading a request's body within limits: JSON only, counted as it arrives, never idle for long.
Knows HTTP headers and bytes; does not parse them."""

from __future__ import annotations

import asyncio

from starlette.requests import Request

from duograph.server.errors import ApiError

BODY_IDLE_S = 10.0  # without a byte


async def read_json_body(request: Request, max_bytes: int) -> bytes:
    """Raises ApiError 408, 413 or 415."""
    _check_headers(request, max_bytes)
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
            raise _too_large(max_bytes)
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)


def _check_headers(request: Request, max_bytes: int) -> None:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, "The body must be sent with content-type: application/json")
    if request.headers.get("content-encoding", "identity").strip().lower() != "identity":
        raise ApiError(415, "Compressed bodies are not accepted")
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length[:20]) > max_bytes:
        raise _too_large(max_bytes)


def _too_large(max_bytes: int) -> ApiError:
    # the rest of the body is not worth reading
    return ApiError(
        413, f"The body is larger than {max_bytes} bytes", headers={"connection": "close"}
    )
