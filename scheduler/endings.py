"""The terminal message of a request, in its three kinds. Pure."""

from __future__ import annotations

from duograph.scheduler.messages import ErrorCode, Finished, FinishReason, GenerateRequest
from duograph.scheduler.request import Request


def finished(request: Request, reason: FinishReason, token: int | None) -> Finished:
    """It has written what it was to write. ``token`` is the stop token that ended it."""
    return Finished(
        rid=request.rid,
        reason=reason,
        prompt_tokens=request.prompt_len,
        completion_tokens=len(request.output_ids),
        cached_tokens=request.cached_tokens,
        matched_token=token,
    )


def failed(request: Request, code: ErrorCode, message: str) -> Finished:
    """It was in, and could not be finished."""
    return Finished(
        rid=request.rid,
        reason="error",
        prompt_tokens=request.prompt_len,
        completion_tokens=len(request.output_ids),
        cached_tokens=request.cached_tokens,
        error_code=code,
        error_message=message,
    )


def refused(message: GenerateRequest, code: ErrorCode, text: str) -> Finished:
    """It never was in."""
    return Finished(
        rid=message.rid,
        reason="error",
        prompt_tokens=len(message.input_ids),
        completion_tokens=0,
        cached_tokens=0,
        error_code=code,
        error_message=text,
    )
