"""Every way a request can fail, as an OpenAI error envelope.

Knows statuses, types and codes; does not know HTTP responses' bytes on the wire beyond the JSON
body, nor why something failed. Texts never hold paths, addresses or tracebacks.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping

import orjson

from duograph.scheduler.messages import ErrorCode

MAX_CLIENT_TEXT = 256  # client text that is quoted in an error or a log line is cut here


class ApiError(Exception):
    """One failed request, with its status and envelope."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.headers = dict(headers or {})

    @property
    def type(self) -> str:
        if self.status == 429:
            return "rate_limit_error"
        return "server_error" if self.status >= 500 else "invalid_request_error"

    def body(self) -> bytes:
        """The envelope as JSON."""
        error = {
            "message": self.message,
            "type": self.type,
            "param": self.param,
            "code": self.code,
        }
        return orjson.dumps({"error": error})


def bad_field(param: str, message: str) -> ApiError:
    """400 that names the field."""
    return ApiError(400, f"{param}: {message}", param=param)


def not_supported(param: str, reason: str = "not supported yet") -> ApiError:
    """400 for a field that is understood but not honoured: ignoring it would give a wrong
    answer."""
    return ApiError(400, f"{param}: {reason}", param=param, code="unsupported_parameter")


def model_not_found(name: str) -> ApiError:
    return ApiError(
        404,
        f"The model {quote(name)} does not exist; GET /v1/models lists what is served",
        param="model",
        code="model_not_found",
    )


def admin_closed() -> ApiError:
    return ApiError(
        403,
        "This route is for the operator and is closed; start the server with --admin-api-key "
        "and send that key as Authorization: Bearer KEY",
        code="admin_closed",
    )


def overloaded() -> ApiError:
    return ApiError(
        503,
        "The server's queue is full; try again shortly",
        code="overloaded",
        headers={"retry-after": "1"},
    )


def starting(detail: str) -> ApiError:
    return ApiError(
        503, f"The server is starting: {detail}", code="starting", headers={"retry-after": "1"}
    )


def draining() -> ApiError:
    return ApiError(503, "The server is shutting down", code="draining")


def engine_dead() -> ApiError:
    return ApiError(503, "The engine does not answer", code="engine_dead")


def internal() -> ApiError:
    return ApiError(500, "Internal error; the request id is in the x-request-id header")


def context_length_exceeded(
    *, context_length: int, prompt_tokens: int, max_tokens: int | None, param: str
) -> ApiError:
    """Client libraries match on the code and on the words "maximum context length"."""
    asked = f"{prompt_tokens} tokens in the prompt"
    if max_tokens is not None:
        asked = f"{prompt_tokens + max_tokens} tokens ({asked}, {max_tokens} in the completion)"
    return ApiError(
        400,
        f"This model's maximum context length is {context_length} tokens, but the request needs "
        f"{asked}. Shorten the prompt or the completion.",
        param=param,
        code="context_length_exceeded",
    )


def from_engine(code: ErrorCode | None, message: str) -> ApiError:
    """The error for a request that the engine ended with reason "error"."""
    match code:
        case "invalid_request":
            return ApiError(400, message)
        case "invalid_grammar":
            return ApiError(400, message, param=message.partition(":")[0] or None)
        case "context_length_exceeded":
            return ApiError(400, message, code="context_length_exceeded")
        case "overloaded":
            return overloaded()
        case "timeout":
            return ApiError(503, message or "The request took too long", code="timeout")
        case "draining":
            return draining()
        case "aborted":  # a status that client libraries do not try again
            return ApiError(400, message or "The request was aborted", code="aborted")
        case _:
            return internal()


def new_request_id() -> str:
    """For an answer to a client that gave none."""
    return f"req-{uuid.uuid4().hex}"


def quote(text: str) -> str:
    """Client text for an error message or a log line: escaped and cut."""
    cut = text if len(text) <= MAX_CLIENT_TEXT else text[:MAX_CLIENT_TEXT] + "..."
    return ascii(cut)
