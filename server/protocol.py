"""uvicorn's HTTP protocol with limits on headers and connections, and a wire for streams.

The wire lets a stream write its chunks straight to the transport, with no task woken per chunk;
ASGI's send still carries the head and the end of the response. Knows bytes and timers; does not
know requests' meaning.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any, Protocol, cast

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from duograph.server.errors import ApiError, new_request_id

WIRE_EXTENSION = "duograph.wire"  # in scope["extensions"]

HEADER_TIMEOUT_S = 10.0
MAX_HEADER_BYTES = 64 * 1024
MAX_HEADERS = 100
MAX_CONNECTIONS = 1024  # of one frontend process
SLOW_READER_BYTES = 256 * 1024
SLOW_READER_S = 30.0

_REASONS = {400: b"Bad Request", 431: b"Request Header Fields Too Large",
            408: b"Request Timeout", 503: b"Service Unavailable"}  # fmt: skip


class Wire(Protocol):
    """The body of one running response whose length nobody knows."""

    def begin(self) -> None:
        """Before the response's head is sent."""

    def write_chunk(self, payload: bytes) -> bool:
        """Queues one piece. False if the client has gone, or has been cut off because it
        reads too slowly."""

    def cut(self) -> None:
        """Drops the connection with all that waits."""


class _HeaderLimitError(Exception):
    """Headers too many or too long."""


class _SeveralHostsError(Exception):
    """A proxy may have looked at another one than this server would."""


def _explained(error: httptools.HttpParserCallbackError) -> ApiError:
    """What the client did wrong to make a callback of the parser raise. Raises ``error`` itself
    if it is not the client's fault."""
    match error.__context__:
        case _HeaderLimitError():
            text = f"Headers are limited to {MAX_HEADERS} lines and {MAX_HEADER_BYTES} bytes"
            return ApiError(431, text)
        case _SeveralHostsError():
            return ApiError(400, "The request has more than one Host header")
        # uvicorn reads the target only once all headers are there: no URL, or not ASCII
        case httptools.HttpParserError() | UnicodeDecodeError():
            return ApiError(400, "The request's target is not a valid URL")
        case _:
            raise error


class LimitedHttpProtocol(HttpToolsProtocol):
    """One connection."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._header_timer: asyncio.TimerHandle | None = None
        self._header_bytes = 0
        self._stalled_since: float | None = None  # when unsent bytes were first seen
        self._cycles: list[RequestResponseCycle] = []  # of requests not answered in full

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > MAX_CONNECTIONS:
            self._refuse(ApiError(503, "Too many connections", code="overloaded"))
            return
        self._arm_header_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm_header_timer()
        super().connection_lost(exc)
        # uvicorn tells the newest request alone, which may wait behind the one that runs
        for cycle in self._cycles:
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserCallbackError as error:
            self._refuse(_explained(error))
        except httptools.HttpParserUpgrade:
            self._refuse(ApiError(400, "Protocol upgrades are not served"))
        except httptools.HttpParserError:
            self._refuse(ApiError(400, "This is not a valid HTTP request"))

    # parser callbacks

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._header_bytes = 0
        if self._header_timer is None:
            self._arm_header_timer()

    def on_url(self, url: bytes) -> None:
        self._count_header_bytes(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count_header_bytes(len(name) + len(value))
        if len(self.headers) >= MAX_HEADERS:
            raise _HeaderLimitError
        if name.lower() == b"host" and any(known == b"host" for known, _ in self.headers):
            raise _SeveralHostsError
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._disarm_header_timer()
        super().on_headers_complete()
        # the request's task has not begun to run: it sees the extension
        scope = cast(dict[str, Any], self.scope)
        self._cycles = [cycle for cycle in self._cycles if not cycle.response_complete]
        self._cycles.append(self.cycle)
        has_chunks = scope["http_version"] != "1.0"
        wire = self if has_chunks else _UnchunkedWire(self, self.cycle)
        scope["extensions"] = {WIRE_EXTENSION: wire}

    # the wire

    def begin(self) -> None:
        """See Wire."""

    def write_chunk(self, payload: bytes) -> bool:
        """See Wire."""
        return self.write_raw(b"%x\r\n%b\r\n" % (len(payload), payload))

    def write_raw(self, data: bytes) -> bool:
        """What an earlier turn of the event loop could not send still waits in the transport, so
        its size before this write is what the client has not read."""
        transport = self.transport
        if transport.is_closing():
            return False
        waiting = transport.get_write_buffer_size()
        if waiting == 0:
            self._stalled_since = None
        elif not self._keeps_up(waiting):
            self.cut()
            return False
        transport.write(data)
        return True

    def cut(self) -> None:
        """See Wire."""
        self.transport.abort()

    def _keeps_up(self, waiting: int) -> bool:
        now = time.monotonic()
        if self._stalled_since is None:
            self._stalled_since = now
        return waiting <= SLOW_READER_BYTES and now - self._stalled_since <= SLOW_READER_S

    # limits

    def _count_header_bytes(self, count: int) -> None:
        self._header_bytes += count
        if self._header_bytes > MAX_HEADER_BYTES:
            raise _HeaderLimitError

    def _arm_header_timer(self) -> None:
        self._header_timer = self.loop.call_later(HEADER_TIMEOUT_S, self._header_timeout)

    def _disarm_header_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _header_timeout(self) -> None:
        self._header_timer = None
        self._refuse(ApiError(408, "The request's headers did not arrive in time"))

    def _refuse(self, error: ApiError) -> None:
        """Answers before there is a request that an application could answer."""
        self._disarm_header_timer()
        if self.transport.is_closing():
            return
        body = error.body()
        head = (
            b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n"
            b"x-request-id: %b\r\nconnection: close\r\n\r\n"
        )
        parts = (error.status, _REASONS[error.status], len(body), new_request_id().encode())
        self.transport.write(head % parts + body)
        self.transport.close()


class _UnchunkedWire:
    """The wire of a client that speaks HTTP/1.0, where there are no chunks: the body ends where
    the connection does."""

    def __init__(self, protocol: LimitedHttpProtocol, cycle: RequestResponseCycle) -> None:
        self._protocol = protocol
        self._cycle = cycle

    def begin(self) -> None:
        """See Wire."""
        self._cycle.chunked_encoding = False
        self._cycle.keep_alive = False

    def write_chunk(self, payload: bytes) -> bool:
        """See Wire."""
        return self._protocol.write_raw(payload)

    def cut(self) -> None:
        """See Wire."""
        self._protocol.cut()
