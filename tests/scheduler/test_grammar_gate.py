"""Requests with grammars before the scheduler: compiled beside the loop, once for each text, in
bounded time, and never in the way of others."""

from __future__ import annotations

import select
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from msgspec.structs import replace

from duograph.scheduler import grammar_gate
from duograph.scheduler.grammar import GrammarError
from duograph.scheduler.grammar_gate import GrammarGate
from duograph.scheduler.grammar_masks import OpenGrammar
from duograph.scheduler.messages import AbortRequest, GenerateRequest, Grammar
from duograph.scheduler.step import CompiledRequest, Event
from duograph.tests.scheduler.driver import Driver, request


@dataclass
class Compiler:
    """ "bad" fails, "slow" waits for ``release``."""

    compiled: list[str] = field(default_factory=list)
    release: threading.Event = field(default_factory=threading.Event)

    def compile(self, grammar: Grammar) -> Compiler:
        self.compiled.append(grammar.text)
        if grammar.text.startswith("slow"):
            self.release.wait(30)
        if grammar.text == "bad":
            raise GrammarError(f"{grammar.param}: it is bad")
        if grammar.text == "broken":
            raise RuntimeError("a fault of the library")
        return self

    def start(self) -> OpenGrammar:
        return OpenGrammar()


def asks(rid: int, text: str, param: str = "regex", **fields: Any) -> GenerateRequest:
    return replace(request(rid), grammar=Grammar("document", text, param), **fields)


def gate(compiler: Compiler, **options: Any) -> GrammarGate:
    return GrammarGate(compiler, **({"timeout_s": 10.0, "max_waiting": 8} | options))


def collect(
    door: GrammarGate, count: int, *arrived: Event, timeout_s: float = 10.0
) -> list[CompiledRequest]:
    """Waits as the engine does, for ``count`` events."""
    events = door.sift(arrived)
    deadline = time.monotonic() + timeout_s
    while len(events) < count:
        assert time.monotonic() < deadline, f"only {events}"
        select.select([door.fileno()], [], [], 0.05)
        events += door.sift([])
    assert all(isinstance(event, CompiledRequest) for event in events)
    return events  # type: ignore[return-value]


def test_requests_wait_for_their_grammar_and_nothing_else_does() -> None:
    compiler = Compiler()
    door = gate(compiler)
    plain, abort = request(1), AbortRequest(9)
    assert door.sift([asks(2, "slow"), plain, abort]) == [plain, abort]
    assert door.busy and door.num_waiting == 1
    compiler.release.set()
    [event] = collect(door, 1)
    assert event.message.rid == 2 and event.grammar is not None
    assert not door.busy


def test_a_text_is_compiled_once_for_all_that_ask_for_it() -> None:
    compiler = Compiler()
    door = gate(compiler)
    door.sift([asks(1, "slow a"), asks(2, "slow a")])
    compiler.release.set()
    events = collect(door, 2)
    assert events[0].grammar is not events[1].grammar  # each walks on its own
    [cached] = door.sift([asks(3, "slow a")])
    assert isinstance(cached, CompiledRequest) and cached.grammar is not None
    assert compiler.compiled == ["slow a"] and door.stats.cache_hits == 1


@pytest.mark.parametrize(("text", "error"), [("bad", "it is bad"), ("broken", "RuntimeError")])
def test_what_is_wrong_is_told_under_the_field_of_the_request(text: str, error: str) -> None:
    door = gate(Compiler())
    for rid, param in ((1, "regex"), (2, "ebnf")):
        [event] = collect(door, 1, asks(rid, text, param))
        assert event.grammar is None and event.code == "invalid_grammar"
        assert event.error.startswith(f"{param}: ") and error in event.error
    driver = Driver()
    driver.step(event)
    assert driver.finished[2].error_code == "invalid_grammar"


def test_an_aborted_request_leaves_before_its_grammar_is_ready() -> None:
    compiler = Compiler()
    door = gate(compiler)
    door.sift([asks(1, "slow"), asks(2, "slow")])
    assert door.sift([AbortRequest(1)]) == [AbortRequest(1)]
    assert [m.rid for m in door.take_named(None)] == [2]
    compiler.release.set()
    deadline = time.monotonic() + 10
    while door.busy:
        assert door.sift([]) == []
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_compilation_without_end_is_given_up_and_others_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grammar_gate, "COMPILE_THREADS", 1)
    compiler = Compiler()
    door = gate(compiler, timeout_s=0.1)
    events = collect(door, 2, asks(1, "slow"), asks(2, "good"))
    late, good = sorted(events, key=lambda event: event.message.rid)
    assert late.grammar is None and late.error == (
        "regex: the grammar takes longer than 0.1 s to compile"
    )
    assert good.grammar is not None
    assert door.stats.timeouts == 1 and not door.busy
    compiler.release.set()

    def found() -> bool:  # the result of the lost thread serves the next
        door.sift([])
        return door._cache.get(("document", "regex", "", "slow")) is not None

    poll(found)
    [cached] = door.sift([asks(3, "slow")])
    assert isinstance(cached, CompiledRequest) and cached.grammar is not None


def poll(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_no_more_than_so_many_wait() -> None:
    compiler = Compiler()
    door = gate(compiler, max_waiting=2)
    assert door.sift([asks(1, "slow"), asks(2, "slow 2")]) == []
    [event] = door.sift([asks(3, "slow 3")])
    assert isinstance(event, CompiledRequest) and event.code == "overloaded"
    compiler.release.set()


def test_the_cache_drops_what_was_not_used_for_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_gate, "CACHE_ENTRIES", 2)
    compiler = Compiler()
    door = gate(compiler)
    for rid, text in enumerate(("a", "b", "a", "c", "a", "b")):
        collect(door, 1, asks(rid, text))
    assert compiler.compiled == ["a", "b", "c", "b"]


def test_the_scheduler_lets_no_uncompiled_grammar_in() -> None:
    driver = Driver()
    driver.step(asks(1, "a"))
    assert driver.finished[1].error_code == "invalid_request"


def test_a_compiled_request_passes_the_same_door() -> None:
    driver = Driver()
    driver.step(CompiledRequest(replace_prompt(asks(1, "a")), object()))  # type: ignore[arg-type]
    assert driver.finished[1].error_code == "invalid_request"


def replace_prompt(message: GenerateRequest) -> GenerateRequest:
    return replace(message, input_ids=[10_000])
