"""The two loops of the engine, side by side, in the same verbs: receive, take (commit, admit),
send, plan, build, launch, wait.

Tokens are sent before the next step is planned: they have waited for their step, and in the
overlap loop the device has the step after it to work on meanwhile. What is sent after the plan
are the ends of requests that could not be planned.

The plain loop reads each result before it makes the next plan. The overlap loop launches step
n + 1 before it reads the result of n, so that the device never waits for Python: sampled tokens
go from one step to the next on the device, and the host learns of them one step late.
"""

from __future__ import annotations

from typing import Protocol

from duograph.runners.batch import ForwardBatch
from duograph.scheduler.scheduler import Scheduler
from duograph.scheduler.step import CompletedStep, Event, Plan, Step


class PendingStep(Protocol):
    """runners.batch.StepOutput: a launched step."""

    def wait(self) -> CompletedStep:
        """Blocks until the step is over. Raises what the device raised."""


class EngineParts(Protocol):
    """What the loops need; ``engine.Engine`` is the real one."""

    scheduler: Scheduler

    def alive(self) -> bool:
        """False when the loop is to end. Sends the heartbeat when it is due."""

    def now(self) -> float: ...

    def receive(self, *, block: bool) -> list[Event]:
        """What the frontends sent. ``block`` waits for something, up to the next heartbeat."""

    def build(self, plan: Plan) -> ForwardBatch: ...

    def launch(self, batch: ForwardBatch) -> PendingStep: ...

    def send(self, step: Step) -> None: ...


def plain_loop(engine: EngineParts) -> None:
    results: list[Event] = []
    while engine.alive():
        events = results + engine.receive(block=engine.scheduler.is_idle)
        engine.send(engine.scheduler.take(events, engine.now()))
        step = engine.scheduler.plan()
        engine.send(step)
        launched = engine.launch(engine.build(step.plan)) if step.plan else None
        results = [launched.wait()] if launched else []


def overlap_loop(engine: EngineParts) -> None:
    results: list[Event] = []
    running: PendingStep | None = None  # launched before ``launched``; its result is not read
    while engine.alive():
        events = results + engine.receive(block=engine.scheduler.is_idle)
        engine.send(engine.scheduler.take(events, engine.now()))
        step = engine.scheduler.plan()
        engine.send(step)
        launched = engine.launch(engine.build(step.plan)) if step.plan else None
        results = [running.wait()] if running else []
        running = launched
