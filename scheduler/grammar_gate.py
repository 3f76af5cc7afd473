"""Requests with a grammar wait here until it is compiled; then the scheduler sees them.

Compiling runs in a few threads beside the engine's loop, so that a hostile grammar delays nobody
but requests with grammars that are not in the cache, and those only until its time is up. Knows
no token and no plan.
"""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue

from duograph.scheduler.grammar import CompiledGrammar, GrammarCompiler, GrammarError
from duograph.scheduler.grammar_masks import GrammarState
from duograph.scheduler.messages import AbortRequest, ErrorCode, GenerateRequest
from duograph.scheduler.step import CompiledRequest, Event

COMPILE_THREADS = 2
MAX_LOST_THREADS = 4  # beyond their time at once; each is replaced while it goes on
CACHE_ENTRIES = 128
CACHE_BYTES = 2 * 1024 * 1024  # of grammar texts

_Key = tuple[str, str, str, str]  # kind, field, prelude, text


@dataclass(slots=True)
class _Job:
    key: _Key
    waiting: list[GenerateRequest]
    started: float | None = None  # when a thread took it
    given_up: bool = False
    replaced: bool = False  # by another thread, for as long as it goes on


@dataclass(slots=True)
class GrammarStats:
    """Counters since start."""

    compiled: int = 0
    failed: int = 0
    timeouts: int = 0
    cache_hits: int = 0
    compile_seconds: float = 0.0

    def as_metrics(self) -> dict[str, float]:
        return {
            "duograph_grammar_compiled_total": float(self.compiled),
            "duograph_grammar_failed_total": float(self.failed),
            "duograph_grammar_timeouts_total": float(self.timeouts),
            "duograph_grammar_cache_hits_total": float(self.cache_hits),
            "duograph_grammar_compile_seconds_total": self.compile_seconds,
        }


@dataclass(slots=True)
class _Cache:
    """Least recently used first; an entry is a compiled grammar or what is wrong with it."""

    entries: OrderedDict[_Key, CompiledGrammar | str] = field(default_factory=OrderedDict)
    nbytes: int = 0

    def get(self, key: _Key) -> CompiledGrammar | str | None:
        found = self.entries.get(key)
        if found is not None:
            self.entries.move_to_end(key)
        return found

    def put(self, key: _Key, value: CompiledGrammar | str) -> None:
        if key not in self.entries:
            self.nbytes += len(key[-1])
        self.entries[key] = value
        while len(self.entries) > CACHE_ENTRIES or self.nbytes > CACHE_BYTES:
            oldest, _ = self.entries.popitem(last=False)
            self.nbytes -= len(oldest[-1])


class GrammarGate:
    """Used by the engine's thread; only the compilers' threads are others."""

    def __init__(self, compiler: GrammarCompiler, *, timeout_s: float, max_waiting: int) -> None:
        """``timeout_s`` of one compilation, ``max_waiting`` requests at once."""
        self._compiler = compiler
        self._timeout_s = timeout_s
        self._max_waiting = max_waiting
        self._cache = _Cache()
        self._jobs: dict[_Key, _Job] = {}
        self._queue: SimpleQueue[tuple[_Job, GenerateRequest] | None] = SimpleQueue()
        self._done: deque[tuple[_Job, CompiledGrammar | str, float]] = deque()
        self._lost = 0
        self._threads = 0
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.stats = GrammarStats()

    @property
    def busy(self) -> bool:
        """Whether requests wait here."""
        return bool(self._jobs)

    @property
    def num_waiting(self) -> int:
        return sum(len(job.waiting) for job in self._jobs.values())

    def fileno(self) -> int:
        """Readable when a compilation has ended."""
        return self._wake

    def sift(self, arrived: Sequence[Event]) -> list[Event]:
        """What the scheduler may see now: everything else that arrived, in order, and requests
        whose grammars are ready or refused."""
        events: list[Event] = []
        for event in arrived:
            if isinstance(event, GenerateRequest) and event.grammar is not None:
                events += self._take(event)
            else:
                if isinstance(event, AbortRequest):
                    self._drop(event.rid)
                events.append(event)
        return events + self._finished()

    def take_named(self, name: str | None) -> list[GenerateRequest]:
        """Removes the waiting requests of that client's name, or all of them."""
        taken = []
        for job in self._jobs.values():
            taken += [m for m in job.waiting if name is None or m.name == name]
            job.waiting = [m for m in job.waiting if name is not None and m.name != name]
        return taken

    def close(self) -> None:
        """Threads end when they have compiled what they are at."""
        while self._threads:
            self._end_thread()

    def _take(self, message: GenerateRequest) -> list[Event]:
        assert message.grammar is not None
        grammar = message.grammar
        key = (grammar.kind, grammar.param, grammar.prelude, grammar.text)
        found = self._cache.get(key)
        if found is not None:
            self.stats.cache_hits += 1
            return [_event(message, found)]
        if self.num_waiting >= self._max_waiting:
            return [CompiledRequest(message, None, "overloaded", "too many grammars wait")]
        job = self._jobs.get(key)
        if job is not None:
            job.waiting.append(message)
            return []
        job = self._jobs[key] = _Job(key, [message])
        while self._threads < COMPILE_THREADS:
            self._start_thread()
        self._queue.put((job, message))
        return []

    def _drop(self, rid: int) -> None:
        for job in self._jobs.values():
            job.waiting = [message for message in job.waiting if message.rid != rid]

    def _finished(self) -> list[Event]:
        if not self._jobs and not self._done:
            return []
        try:
            os.eventfd_read(self._wake)
        except BlockingIOError:
            pass  # nothing has ended since
        events: list[Event] = []
        while self._done:
            job, result, seconds = self._done.popleft()
            self._cache.put(job.key, result)
            self.stats.compile_seconds += seconds
            self.stats.compiled += 1
            self.stats.failed += isinstance(result, str)
            if job.given_up:
                self._lost -= 1
                if job.replaced:
                    self._end_thread()
                continue
            del self._jobs[job.key]
            events += [_event(message, result) for message in job.waiting]
        return events + self._overdue(time.monotonic())

    def _overdue(self, now: float) -> list[Event]:
        events: list[Event] = []
        for job in list(self._jobs.values()):
            if job.started is None or now - job.started <= self._timeout_s:
                continue
            job.given_up = True
            del self._jobs[job.key]
            self.stats.timeouts += 1
            self._lost += 1
            if self._lost <= MAX_LOST_THREADS:
                job.replaced = True
                self._start_thread()  # one ends when the lost one is back
            for message in job.waiting:
                assert message.grammar is not None
                text = (
                    f"{message.grammar.param}: the grammar takes longer than "
                    f"{self._timeout_s:g} s to compile"
                )
                events.append(CompiledRequest(message, None, "invalid_grammar", text))
        return events

    def _start_thread(self) -> None:
        self._threads += 1
        # a daemon: a grammar that compiles for long must not keep the process from ending
        threading.Thread(target=self._run, name="grammar", daemon=True).start()

    def _end_thread(self) -> None:
        self._threads -= 1
        self._queue.put(None)

    def _run(self) -> None:
        while (entry := self._queue.get()) is not None:
            job, message = entry
            assert message.grammar is not None
            job.started = started = time.monotonic()
            result: CompiledGrammar | str
            try:
                result = self._compiler.compile(message.grammar)
            except GrammarError as error:
                result = str(error)
            except Exception as error:  # the library's own fault: this grammar cannot be used
                result = f"{message.grammar.param}: cannot be compiled ({type(error).__name__})"
            self._done.append((job, result, time.monotonic() - started))
            os.eventfd_write(self._wake, 1)


def _event(message: GenerateRequest, result: CompiledGrammar | str) -> CompiledRequest:
    if isinstance(result, str):
        code: ErrorCode = "invalid_grammar"
        return CompiledRequest(message, None, code, result)
    assert message.grammar is not None
    return CompiledRequest(message, GrammarState(result.start(), message.grammar.param))
