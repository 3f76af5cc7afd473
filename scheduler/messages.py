"""Every message on every wire. msgspec structs, tagged; one union per direction.

Wires: each frontend pushes ``ToScheduler`` to the scheduler; the scheduler pushes
``ToFrontend`` to each frontend (one ``StepTokens`` per step and frontend) and ``ToSupervisor``
to the supervisor. Frames are hostile input: see channel.py. Tokens and numbers only, no text
but error texts and names.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from duograph.runners.sampling_params import SamplingParams
from duograph.scheduler.step_sizes import SizeRow

# bits of a request id above this one hold the number of the frontend that made it
RID_FRONTEND_SHIFT = 48


class Grammar(msgspec.Struct, frozen=True, array_like=True):
    """What the text of a request must be. ``param`` is the request's field, for errors."""

    kind: Literal["document", "ebnf"]  # a grammar document of llguidance, or GBNF
    text: str
    param: str
    schemas: dict[str, str] = {}  # JSON schemas within, by field: to find a mistake in
    prelude: str = ""  # a Lark grammar around @constrained, which is the grammar of the text


class GenerateRequest(msgspec.Struct, frozen=True, tag="generate"):
    """One sequence to generate. ``n`` choices are n of these."""

    rid: int  # server-made: frontend number << RID_FRONTEND_SHIFT | counter
    input_ids: list[int]
    sampling: SamplingParams
    cache_salt: str = ""  # prefix cache namespace
    name: str = ""  # what its client calls it; several may have one name
    priority: int = 0  # smaller goes first, with --schedule-policy priority
    grammar: Grammar | None = None


class AbortRequest(msgspec.Struct, frozen=True, tag="abort"):
    """Stop generating for ``rid`` and free what it holds. Unknown ids are ignored: the request
    may have ended already. The frontend sends it when a client has gone or a stop string has
    matched, and expects no answer."""

    rid: int


Command = Literal["flush_cache", "abort_named", "abort_all", "start_profile", "stop_profile"]


class ControlRequest(msgspec.Struct, frozen=True, tag="control"):
    """An order of an operator or a client. Answered by one ControlAnswer."""

    id: int  # made as a request's rid is
    command: Command
    argument: str = ""  # abort_named: the name; start_profile: how many steps, if not the most


ToScheduler = GenerateRequest | AbortRequest | ControlRequest

FinishReason = Literal["stop", "length", "error"]
ErrorCode = Literal[
    "invalid_request",  # 400
    "context_length_exceeded",  # 400
    "overloaded",  # 503, with Retry-After
    "timeout",  # 503
    "internal",  # 500
    "draining",  # 503
    "aborted",  # 400: by an operator, or by its client under the request's name
    "invalid_grammar",  # 400: the text begins with the field that is wrong, and a colon
]


class Finished(msgspec.Struct, frozen=True, array_like=True):
    """The terminal message of a request: exactly one each, except after AbortRequest."""

    rid: int
    reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    matched_token: int | None = None  # the eos or stop token id that ended it
    error_code: ErrorCode | None = None
    error_message: str = ""


class Logprobs(msgspec.Struct, frozen=True, array_like=True):
    """Of one sampled or prompt token; see runners.batch.TokenLogprobs."""

    logprob: float
    top_ids: list[int]
    top_logprobs: list[float]


class StepTokens(msgspec.Struct, frozen=True, tag="tokens"):
    """What one step produced for the requests of one frontend. ``tokens[i]`` is the next token
    of ``rids[i]``; a token that ends its request (eos, stop id) is included. ``finished``
    applies after the tokens."""

    rids: list[int]
    tokens: list[int]
    finished: list[Finished]
    logprobs: dict[int, Logprobs] | None = None  # by index into rids
    cached: dict[int, int] | None = None  # by rid, with its first token: cached prompt tokens
    prompt_logprobs: dict[int, list[Logprobs]] | None = None  # by rid: the next ones of its prompt


class ControlAnswer(msgspec.Struct, frozen=True, tag="control_answer"):
    """``text`` is for the client: what was done, or why not."""

    id: int
    ok: bool
    text: str


Phase = Literal[
    "starting",
    "loading_weights",
    "planning_memory",
    "building_kernels",
    "compiling",
    "capturing_decode",
    "capturing_prefill",
    "warming_up",
    "ready",
    "draining",
]


class EngineStatus(msgspec.Struct, frozen=True, tag="status"):
    """Sent on every change of phase or progress while starting."""

    phase: Phase
    done: int = 0
    total: int = 0


class EngineInfo(msgspec.Struct, frozen=True, tag="info"):
    """Sent once, before phase ready: the limits that frontends check requests against."""

    max_total_num_tokens: int  # KV pool size in tokens, without the dummy page
    max_running_requests: int
    context_length: int
    vocab_size: int
    details: dict[str, Any]  # JSON-able: for /server_info


class Heartbeat(msgspec.Struct, frozen=True, tag="heartbeat"):
    """Every half second, and it stops when the loop is stuck."""

    steps: int  # finished steps since start
    running: int
    waiting: int


class MetricsSnapshot(msgspec.Struct, frozen=True, tag="metrics"):
    """All counters and gauges at once, so that every frontend serves the same page.

    Names carry their label part, as in ``sglang:num_running_reqs`` or
    ``duograph_graph_replays_total{phase="decode",size="8"}``; histograms are
    (upper bounds, counts per bucket with the last one unbounded, sum). ``step_sizes`` holds, by
    phase, the rows of ``step_sizes.StepSizes``: for /graphs, too many for /metrics."""

    counters: dict[str, float]
    gauges: dict[str, float]
    histograms: dict[str, tuple[list[float], list[int], float]]
    step_sizes: dict[str, list[SizeRow]] = {}


ToFrontend = StepTokens | EngineStatus | EngineInfo | Heartbeat | MetricsSnapshot | ControlAnswer


class ProcessFailed(msgspec.Struct, frozen=True, tag="failed"):
    """Last words of a child: the supervisor prints the text and exits with the code."""

    exit_code: int
    message: str


class FrontendBeat(msgspec.Struct, frozen=True, tag="frontend"):
    """Every second from a frontend's event loop, and it stops when that is stuck."""

    index: int
    draining: bool = False  # it has been told to end, perhaps by somebody else


ToSupervisor = EngineStatus | Heartbeat | FrontendBeat | ProcessFailed
