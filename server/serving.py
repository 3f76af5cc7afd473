"""From a request's body to its response: admission, validation, generation, answer.

Knows the order of the steps and the process's state (starting, ready, draining); leaves each step
to its own file. One instance per frontend process.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive

from duograph.runners.sampling_params import SamplingParams
from duograph.scheduler.messages import EngineInfo
from duograph.server import errors
from duograph.server.answers import AnswerHead
from duograph.server.body import parse_object, read_json_body
from duograph.server.config import FrontendConfig
from duograph.server.endpoints import Answer, NativeAnswer, OpenAIAnswer
from duograph.server.engine_client import EngineClient
from duograph.server.generation import ChoicePlan, Generation
from duograph.server.metrics import FrontendMetrics
from duograph.server.native import native_plans
from duograph.server.native_schema import parse_generate
from duograph.server.openai_schema import parse_chat, parse_completion
from duograph.server.sse import DONE
from duograph.server.tokenizer import Tokenizer
from duograph.server.translate import Translator

logger = logging.getLogger(__name__)

ANY_MODEL = "default"  # accepted beside the served names


CLIENT_GONE = 499  # a status for the log alone: there is nobody to answer


@dataclass(slots=True, eq=False)
class Serving:
    config: FrontendConfig
    tokenizer: Tokenizer
    translator: Translator
    engine: EngineClient
    metrics: FrontendMetrics
    draining: bool = False
    _generations: set[Generation] = field(default_factory=set)
    _admitted: int = 0  # sequences of requests in work, also those that are being tokenized
    _requests: int = 0
    _idle: asyncio.Event = field(default_factory=asyncio.Event)

    # state

    def unavailable(self) -> errors.ApiError | None:
        """Why no request can be served now; None if it can."""
        if self.draining:
            return errors.draining()
        if not self.engine.ready:
            return errors.starting(self.progress())
        if not self.engine.alive:
            return errors.engine_dead()
        return None

    def progress(self) -> str:
        """Such as "capturing decode 12/36"."""
        status = self.engine.status
        counts = f" {status.done}/{status.total}" if status.total else ""
        return status.phase.replace("_", " ") + counts

    @property
    def info(self) -> EngineInfo:
        """Only to be asked for while the engine is ready."""
        assert self.engine.info is not None
        return self.engine.info

    def check_ready(self) -> None:
        """Raises ApiError 503 while nothing can be served."""
        reason = self.unavailable()
        if reason is not None:
            raise reason

    async def drain(self, timeout_s: float, error: errors.ApiError | None = None) -> None:
        """Refuses new requests and waits for the running ones; those that are left at the
        timeout are ended with ``error``."""
        self.draining = True
        try:
            async with asyncio.timeout(timeout_s):
                await self._until_idle()
        except TimeoutError:
            logger.warning("%d requests did not end in time", self._requests)
            for generation in list(self._generations):
                generation.fail(error or errors.draining())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):  # for the error events to be written
                    await self._until_idle()

    async def _until_idle(self) -> None:
        while self._requests:
            self._idle.clear()
            await self._idle.wait()

    # the endpoints that generate; all raise ApiError

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        self.check_accepting()
        return await self._chat(request.receive, await self.body(request))

    async def completion(self, request: Request) -> Response:
        """POST /v1/completions."""
        self.check_accepting()
        return await self._completion(request.receive, await self.body(request))

    async def generate(self, request: Request) -> Response:
        """POST /generate."""
        self.check_accepting()
        return await self._generate(request.receive, await self.body(request))

    async def invocation(self, request: Request) -> Response:
        """POST /invocations: one of the three, told by the field that holds the prompt."""
        self.check_accepting()
        body = await self.body(request)
        fields = parse_object(body)
        for name, answer in (
            ("messages", self._chat),
            ("prompt", self._completion),
            ("text", self._generate),
            ("input_ids", self._generate),
        ):
            if name in fields:
                return await answer(request.receive, body)
        raise errors.bad_field("messages", "one of messages, prompt, text, input_ids is required")

    async def _chat(self, receive: Receive, body: bytes) -> Response:
        parsed = parse_chat(body)
        self.check_model(parsed.model)
        with self._admit(parsed.num_sequences) as admission:
            plans = await self.translator.chat(parsed, self.info)
            head = AnswerHead.new("chatcmpl", self.config.served_names[0], parsed.client_id)
            answer = OpenAIAnswer(head, parsed, self.tokenizer)
            return await self._answer(receive, plans, answer, admission)

    async def _completion(self, receive: Receive, body: bytes) -> Response:
        parsed = parse_completion(body)
        self.check_model(parsed.model)
        with self._admit(parsed.num_sequences) as admission:
            plans = await self.translator.completion(parsed, self.info)
            head = AnswerHead.new("cmpl", self.config.served_names[0], parsed.client_id)
            answer = OpenAIAnswer(head, parsed, self.tokenizer)
            return await self._answer(receive, plans, answer, admission)

    async def _generate(self, receive: Receive, body: bytes) -> Response:
        parsed = parse_generate(body)
        with self._admit(1) as admission:
            plans = await native_plans(parsed, self.translator, self.info)
            admission.grow(len(plans))
            answer = NativeAnswer.new(parsed, plans, self.tokenizer)
            return await self._answer(receive, plans, answer, admission)

    async def generate_one_token(self) -> None:
        """A real request through the engine, that of GET /health_generate. Raises ApiError."""
        self.check_accepting()
        with self._admit(1):
            sampling = SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True)
            generation = self._new_generation([ChoicePlan(0, [0], sampling)], streamed=False)
            generation.submit(cache_salt="")
            try:
                await generation.done
            finally:
                generation.abort()
            if generation.error is not None:
                raise generation.error

    async def body(self, request: Request) -> bytes:
        """Raises ApiError 408, 413 or 415."""
        return await read_json_body(request, self.config.http.max_body_bytes)

    def check_model(self, name: str | None) -> None:
        """Raises ApiError 404."""
        if name not in (None, ANY_MODEL, *self.config.served_names):
            raise errors.model_not_found(str(name))

    def check_accepting(self, sequences: int = 1) -> None:
        """Before anything is read: a full or starting server answers at once."""
        self.check_ready()
        limit = self.info.max_running_requests + self.config.max_queue
        if sequences > limit:  # never retried with success, so it is not "overloaded"
            raise errors.bad_field(
                "n",
                f"n x prompts must be at most {limit}, the rows and the queue of this server "
                f"(--max-running-requests, --max-queue); got {sequences}",
            )
        is_full = self._admitted + sequences > limit
        if is_full or self.engine.heartbeat.waiting >= self.config.max_queue:
            raise errors.overloaded()

    def _admit(self, sequences: int) -> _Admission:
        self.check_accepting(sequences)  # others may have come while the body was read
        self._admitted += sequences
        self._requests += 1
        return _Admission(self, sequences)

    def _release(self, sequences: int) -> None:
        self._admitted -= sequences
        self._requests -= 1
        if self._requests == 0:
            self._idle.set()

    def _new_generation(self, plans: list[ChoicePlan], *, streamed: bool) -> Generation:
        return Generation(
            plans,
            client=self.engine,
            tokenizer=self.tokenizer,
            metrics=self.metrics,
            streamed=streamed,
        )

    async def _answer(
        self, receive: Receive, plans: list[ChoicePlan], answer: Answer, admission: _Admission
    ) -> Response:
        """A response to ``plans``. An error before its first byte is raised as ApiError."""
        generation = self._new_generation(plans, streamed=answer.streamed)
        answer.submit(generation)
        self._generations.add(generation)
        watcher = asyncio.create_task(_watch(receive, generation))

        def close() -> None:
            watcher.cancel()
            generation.abort()
            self._generations.discard(generation)

        admission.on_release(close)
        # made now, while the engine works
        stream = answer.stream(generation, admission.end) if answer.streamed else None
        await generation.started
        if stream is not None and generation.error is None and not generation.abandoned:
            admission.hand_over()
            return stream
        await generation.done
        if generation.abandoned:
            return Response(status_code=CLIENT_GONE)
        if generation.error is not None and not answer.tells(generation.error):
            raise generation.error
        whole = answer.whole(generation)
        if stream is None:
            return Response(orjson.dumps(whole), media_type="application/json")
        # an error before the first byte, which the events can tell of
        parts = whole if isinstance(whole, list) else [whole]
        events = b"".join(b"data: " + orjson.dumps(part) + b"\n\n" for part in parts)
        return Response(events + DONE, media_type="text/event-stream")


class _Admission:
    """The place of one request. Given back at the end of the ``with`` block, or later by the
    stream that it was handed over to."""

    def __init__(self, serving: Serving, sequences: int) -> None:
        self._serving = serving
        self._sequences = sequences
        self._callbacks: list[Callable[[], None]] = []
        self._handed_over = False

    def __enter__(self) -> _Admission:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._handed_over:
            self.end()

    def grow(self, sequences: int) -> None:
        """The request has turned out to be ``sequences``. Raises ApiError if they are too many."""
        more = sequences - self._sequences
        if more > 0:
            self._serving.check_accepting(more)
            self._serving._admitted += more
            self._sequences = sequences

    def on_release(self, callback: Callable[[], None]) -> None:
        self._callbacks.append(callback)

    def hand_over(self) -> None:
        """The place now belongs to the caller, who must call ``end`` once."""
        self._handed_over = True

    def end(self) -> None:
        for callback in self._callbacks:
            callback()
        self._serving._release(self._sequences)


async def _watch(receive: Receive, generation: Generation) -> None:
    """Ends the generation when its client has gone. The body has been read, so the next
    message can be nothing else."""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            generation.abandon()
            return
