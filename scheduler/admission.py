"""Who may come in: the limits, the check at the door, and the guess of how much is still to come.

The door is the second validation of every number of a request; the first is at HTTP. A request
that passes it can always run, if need be alone. The guess keeps retraction rare: a newcomer is
let in only if the pages that all would need, should each write ``ratio`` of what it may, are
there. Knows no queue and no page.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from duograph.scheduler.messages import ErrorCode, GenerateRequest

# A client that leaves max_tokens out may write to the end of the context, and hardly ever does.
MAX_EXPECTED_TOKENS = 4096
INITIAL_RATIO = 0.7
MINIMUM_RATIO = 0.1
_FOLLOW = 0.05  # weight of one finished request in the running mean
_MARGIN = 1.15  # expected share of finished requests, times this, is reserved
_BUMP = 0.1  # a retraction was one guess too low


@dataclass(frozen=True, kw_only=True)
class EngineLimits:
    """Sizes that come from the model and from the memory that is there."""

    num_pages: int  # with the dummy page 0
    page_size: int
    max_running_requests: int
    context_length: int  # tokens of prompt + output
    chunked_prefill_size: int  # prompt tokens of one prefill step
    vocab_size: int
    eos_token_ids: tuple[int, ...]

    @property
    def max_total_num_tokens(self) -> int:
        return (self.num_pages - 1) * self.page_size


class RequestRefused(ValueError):
    """The request can not be served; the text is for the client."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code: ErrorCode = code


def check_request(request: GenerateRequest, limits: EngineLimits) -> npt.NDArray[np.int32]:
    """Returns the prompt as int32 [len]. Raises RequestRefused."""
    if not request.input_ids:
        raise RequestRefused("invalid_request", "the prompt is empty")
    vocab = limits.vocab_size
    try:
        ids = np.fromiter(request.input_ids, np.int64, len(request.input_ids))
    except OverflowError:
        wrong = max(request.input_ids)
        raise RequestRefused(
            "invalid_request", f"prompt token {wrong} is not in [0, {vocab})"
        ) from None
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocab:
        wrong = low if low < 0 else high
        raise RequestRefused("invalid_request", f"prompt token {wrong} is not in [0, {vocab})")
    try:
        request.sampling.validate(vocab)
    except ValueError as error:
        raise RequestRefused("invalid_request", str(error)) from None
    prompt, output = len(request.input_ids), request.sampling.max_new_tokens
    for limit, name in (
        (limits.context_length, "the model's context length"),
        (limits.max_total_num_tokens, "the KV pool"),
    ):
        if prompt + output > limit:
            raise RequestRefused(
                "context_length_exceeded",
                f"prompt + max_tokens is {prompt} + {output} = {prompt + output} tokens, "
                f"but {name} holds {limit}",
            )
    return ids.astype(np.int32)


class OutputEstimate:
    """What share of its max_new_tokens a request writes, learnt from those that finished."""

    def __init__(self) -> None:
        self._mean = INITIAL_RATIO / _MARGIN

    @property
    def ratio(self) -> float:
        return min(1.0, max(MINIMUM_RATIO, self._mean * _MARGIN))

    def finished(self, written: int, max_new_tokens: int) -> None:
        expected = min(max_new_tokens, MAX_EXPECTED_TOKENS)
        share = min(1.0, written / expected)
        self._mean += _FOLLOW * (share - self._mean)

    def retracted(self) -> None:
        self._mean = min(1.0, self._mean + _BUMP)
