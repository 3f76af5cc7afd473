"""What a request must answer, from its tokens alone: no pages, no batches, no schedule.

The "model" is a rolling hash. The hash of a prefix stands for the keys and values of its last
token, and the next token is a function of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

PRIME = 2**31 - 1
FACTOR = 48_271
VOCAB = 97
EOS = 3


def mix(state: int, token: int) -> int:
    """The hash of a prefix that ``token`` makes one longer."""
    return (state * FACTOR + token + 1) % PRIME


def next_token(state: int, banned: frozenset[int]) -> int:
    token = (state >> 7) % VOCAB
    while token in banned:
        token = (token + 1) % VOCAB
    return token


@dataclass(frozen=True, kw_only=True)
class Task:
    """One request as its client knows it. ``tokens`` and ``hashes`` go on to max_new tokens,
    past any stop: that is what the device computes for a row that is thrown away."""

    seed: int  # unique; tells the device whose row it is
    salt: str
    prompt: list[int]
    max_new: int
    min_new: int
    stop_ids: frozenset[int]  # eos included unless it is ignored
    tokens: npt.NDArray[np.int64]
    hashes: npt.NDArray[np.int64]  # hashes[i]: of tokens[: i + 1]
    answer: list[int]
    reason: str


def create_task(
    *, seed: int, salt: str, prompt: list[int], max_new: int, min_new: int, stop_ids: frozenset[int]
) -> Task:
    state = sum(salt.encode())  # another namespace must not match: its hashes all differ
    tokens, hashes = list(prompt), []
    for token in prompt:
        state = mix(state, token)
        hashes.append(state)
    answer: list[int] = []
    reason = "length"
    # The oracle.
    for index in range(max_new):
        token = next_token(state, stop_ids if index < min_new else frozenset())
        if reason == "length":
            answer.append(token)
            reason = "stop" if token in stop_ids else "length"
        state = mix(state, token)
        tokens.append(token)
        hashes.append(state)
    return Task(
        seed=seed,
        salt=salt,
        prompt=prompt,
        max_new=max_new,
        min_new=min_new,
        stop_ids=stop_ids,
        tokens=np.array(tokens),
        hashes=np.array(hashes),
        answer=answer,
        reason=reason,
    )
