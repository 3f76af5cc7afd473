"""The frontend's end of the wires to the scheduler: requests out, tokens in.

One reader for the ZMQ socket of this frontend. All messages that wait are taken at once, their
tokens are laid out by sequence, and then each sequence that got some is handed over once: a
frontend that falls behind sends larger pieces instead of more of them. Knows ints and messages;
knows no text and no HTTP.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any, Protocol

import zmq

from duograph.runners.sampling_params import SamplingParams
from duograph.scheduler.channel import Receiver, Sender
from duograph.scheduler.messages import (
    RID_FRONTEND_SHIFT,
    AbortRequest,
    Command,
    ControlAnswer,
    ControlRequest,
    EngineInfo,
    EngineStatus,
    Finished,
    GenerateRequest,
    Grammar,
    Heartbeat,
    Logprobs,
    MetricsSnapshot,
    StepTokens,
    ToFrontend,
)
from duograph.server import errors

logger = logging.getLogger(__name__)

CONTROL_TIMEOUT_S = 30.0  # one step of the engine may come before the answer
MESSAGES_PER_TURN = 64  # then other work of the event loop gets its turn


class Consumer(Protocol):
    """Who gets the output of one sequence."""

    def consume(self) -> None:
        """Tokens wait, or the end does."""

    def failed(self) -> None:
        """``consume`` has raised: the request cannot go on."""


class Sequence:
    """One running request of the engine. The consumer takes ``tokens`` with ``take``."""

    __slots__ = (
        "cached_tokens", "consumer", "finished", "logprobs", "prompt_logprobs", "queued", "rid",
        "tokens",
    )  # fmt: skip

    def __init__(self, rid: int, consumer: Consumer) -> None:
        self.rid = rid
        self.consumer = consumer
        self.tokens: list[int] = []
        self.logprobs: list[Logprobs] = []  # one per token if the request asked for them
        self.prompt_logprobs: list[Logprobs] = []  # complete when the first token is there
        self.cached_tokens: int | None = None  # known with the first token
        self.finished: Finished | None = None
        self.queued = False  # will be handed over at the end of this turn

    def take(self) -> list[int]:
        tokens, self.tokens = self.tokens, []
        return tokens


class EngineClient:
    """Must be used from the event loop's thread."""

    def __init__(
        self,
        *,
        scheduler_address: str,
        own_address: str,
        frontend_index: int,
        heartbeat_timeout_s: float,
    ) -> None:
        """Binds and connects the sockets; a ready engine that is silent for longer than
        ``heartbeat_timeout_s`` counts as dead. Raises zmq.ZMQError."""
        self._context: zmq.Context[Any] = zmq.Context()
        self._receiver: Receiver[ToFrontend] = Receiver(self._context, own_address, ToFrontend)
        self._sender = Sender(self._context, scheduler_address)
        self._sequences: dict[int, Sequence] = {}
        self._orders: dict[int, asyncio.Future[ControlAnswer]] = {}
        self._next_rid = frontend_index << RID_FRONTEND_SHIFT
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self.now = time.monotonic()  # when the engine was last heard
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False
        self.status = EngineStatus(phase="starting")
        self.info: EngineInfo | None = None
        self.heartbeat = Heartbeat(steps=0, running=0, waiting=0)
        self.snapshot: MetricsSnapshot | None = None
        self.malformed = 0  # well-formed frames whose content makes no sense

    def start(self) -> None:
        """Begins to read on the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._receiver.fileno(), self._read)
        self._loop.call_soon(self._read)  # the socket may have become readable before

    def close(self) -> None:
        if self._loop is not None:
            self._loop.remove_reader(self._receiver.fileno())
        self._closed = True
        self._receiver.close()
        self._sender.close()
        self._context.term()

    @property
    def ready(self) -> bool:
        return self.status.phase == "ready" and self.info is not None

    @property
    def alive(self) -> bool:
        """False if a ready engine has gone silent."""
        if not self.ready:
            return True
        return time.monotonic() - self.now < self._heartbeat_timeout_s

    @property
    def running(self) -> int:
        """Sequences of this frontend that have not ended."""
        return len(self._sequences)

    @property
    def dropped_frames(self) -> int:
        return self._receiver.dropped + self.malformed

    def submit(
        self,
        input_ids: list[int],
        sampling: SamplingParams,
        consumer: Consumer,
        *,
        cache_salt: str = "",
        name: str = "",
        priority: int = 0,
        grammar: Grammar | None = None,
    ) -> Sequence:
        """Starts one sequence. Raises ApiError 503 if the pipe to the scheduler is full."""
        rid = self._new_id()
        request = GenerateRequest(
            rid=rid,
            input_ids=input_ids,
            sampling=sampling,
            cache_salt=cache_salt,
            name=name,
            priority=priority,
            grammar=grammar,
        )
        if not self._sender.send(request):
            raise errors.overloaded()
        sequence = Sequence(rid, consumer)
        self._sequences[rid] = sequence
        return sequence

    async def control(self, command: Command, argument: str = "") -> ControlAnswer:
        """Gives the engine an order and waits for its answer. Raises ApiError 503 if none comes."""
        order = ControlRequest(self._new_id(), command, argument)
        if not self._sender.send(order):
            raise errors.overloaded()
        answer: asyncio.Future[ControlAnswer] = asyncio.get_running_loop().create_future()
        self._orders[order.id] = answer
        try:
            async with asyncio.timeout(CONTROL_TIMEOUT_S):
                return await answer
        except TimeoutError:
            raise errors.engine_dead() from None
        finally:
            del self._orders[order.id]

    def _new_id(self) -> int:
        self._next_rid += 1
        return self._next_rid - 1

    def abort(self, sequence: Sequence) -> None:
        """Stops ``sequence``; nothing of it is handed over afterwards. Does nothing if it has
        ended."""
        if self._sequences.pop(sequence.rid, None) is None:
            return
        self._send_abort(sequence.rid)

    def _send_abort(self, rid: int) -> None:
        if self._closed:
            return
        if not self._sender.send(AbortRequest(rid=rid)):
            # the pipe is full: the engine must not go on for nobody, so try again soon
            assert self._loop is not None
            self._loop.call_later(0.05, self._send_abort, rid)

    def _read(self) -> None:
        if self._closed:  # a call that was scheduled before
            return
        messages = self._receiver.drain(MESSAGES_PER_TURN)
        touched: list[Sequence] = []
        for message in messages:
            if type(message) is StepTokens:
                if len(message.rids) == len(message.tokens):
                    self._lay_out(message, touched)
                else:
                    self.malformed += 1
            else:
                self._note(message)
        if messages:
            self.now = time.monotonic()
        for sequence in touched:
            sequence.queued = False
            try:
                sequence.consumer.consume()
            except Exception:
                # one sequence's failure must not take the others' tokens with it
                logger.exception("handling the output of a request failed")
                sequence.consumer.failed()
        # the descriptor is edge-triggered: what came meanwhile makes no new event
        if self._receiver.has_messages():
            assert self._loop is not None
            self._loop.call_soon(self._read)

    def _lay_out(self, message: StepTokens, touched: list[Sequence]) -> None:
        sequences = self._sequences
        for rid, token in zip(message.rids, message.tokens, strict=False):
            sequence = sequences.get(rid)
            if sequence is not None:
                if not sequence.queued:
                    sequence.queued = True
                    touched.append(sequence)
                sequence.tokens.append(token)
        if message.logprobs:
            for index, logprobs in message.logprobs.items():
                if not 0 <= index < len(message.rids):
                    self.malformed += 1
                    continue
                sequence = sequences.get(message.rids[index])
                if sequence is not None:
                    sequence.logprobs.append(logprobs)
        if message.cached or message.prompt_logprobs:
            self._note_prompts(message)
        for finished in message.finished:
            sequence = sequences.pop(finished.rid, None)
            if sequence is not None:
                if not sequence.queued:
                    sequence.queued = True
                    touched.append(sequence)
                sequence.finished = finished

    def _note_prompts(self, message: StepTokens) -> None:
        """What is known of prompts; handed over with the first token or the end."""
        for rid, tokens in (message.cached or {}).items():
            if rid in self._sequences:
                self._sequences[rid].cached_tokens = tokens
        for rid, entries in (message.prompt_logprobs or {}).items():
            if rid in self._sequences:
                self._sequences[rid].prompt_logprobs += entries

    def _note(self, message: ToFrontend) -> None:
        match message:
            case Heartbeat():
                self.heartbeat = message
            case MetricsSnapshot():
                self.snapshot = message
            case EngineInfo():
                self.info = message
            case EngineStatus():
                self.status = message
            case ControlAnswer():
                answer = self._orders.get(message.id)
                if answer is not None and not answer.done():
                    answer.set_result(message)
