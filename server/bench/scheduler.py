"""``duograph bench scheduler``: what one step costs on the host when the model costs nothing.

Real scheduler, batch builder and wire; a worker that answers at once. Every running request
decodes, one step in flight, as in the overlap loop.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import zmq

from duograph.runners.batch import StepResult
from duograph.runners.sampling_params import SamplingParams
from duograph.scheduler.admission import EngineLimits
from duograph.scheduler.batch_builder import BatchBuilder
from duograph.scheduler.channel import Receiver, frontend_address
from duograph.scheduler.config import SchedulerConfig
from duograph.scheduler.exit_codes import ExitCode
from duograph.scheduler.messages import GenerateRequest, ToFrontend
from duograph.scheduler.scheduler import Scheduler
from duograph.scheduler.step import Event, Plan
from duograph.scheduler.wires import Wires

PROMPT_TOKENS = 128
PAGE_SIZE = 16
DEFAULT_SIZES = (1, 16, 64, 256)

Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """Median CPU microseconds of one decode step at ``running`` requests. ``total`` is their
    sum. CPU time of the one thread, and the median, since a busy machine changes both little."""

    running: int
    commit: float  # results in: output, finish rules, messages collected
    plan: float
    build: float  # plan -> ForwardBatch
    send: float  # encode the message and give it to the socket
    other: float  # the rest of Scheduler.step

    @property
    def total(self) -> float:
        return self.commit + self.plan + self.build + self.send + self.other


class _Stopwatch:
    """Keeps this thread's CPU seconds of every wrapped call, by name."""

    def __init__(self) -> None:
        self.calls: dict[str, list[float]] = {}

    def wrap(self, name: str, function: Callable[..., Result]) -> Callable[..., Result]:
        self.calls[name] = []

        def timed(*args: Any) -> Result:
            started = time.thread_time()
            result = function(*args)
            self.calls[name].append(time.thread_time() - started)
            return result

        return timed

    def median_us(self, name: str, last: int) -> float:
        return 1e6 * statistics.median(self.calls[name][-last:])


def measure(running: int, *, steps: int = 400, warmup: int = 50) -> StepCost:
    """``steps`` decode steps of ``running`` requests, after ``warmup`` uncounted ones."""
    scheduler = _create_scheduler(running, steps + warmup)
    builder = BatchBuilder(page_size=PAGE_SIZE, pinned=False)
    with tempfile.TemporaryDirectory() as run_dir, zmq.Context() as context:
        frontend: Receiver[ToFrontend] = Receiver(context, frontend_address(run_dir, 0), ToFrontend)
        wires = Wires(run_dir, 1)
        try:
            return _measure(scheduler, builder, wires, frontend, steps=steps, warmup=warmup)
        finally:
            wires.close(0)
            frontend.close()


def _measure(
    scheduler: Scheduler,
    builder: BatchBuilder,
    wires: Wires,
    frontend: Receiver[ToFrontend],
    *,
    steps: int,
    warmup: int,
) -> StepCost:
    running = scheduler.limits.max_running_requests
    watch = _Stopwatch()
    planner = scheduler._planner
    planner.plan = watch.wrap("plan", planner.plan)  # type: ignore[method-assign]
    scheduler._commit = watch.wrap("commit", scheduler._commit)  # type: ignore[method-assign]
    step_once = watch.wrap("step", scheduler.step)
    build = watch.wrap("build", builder.build)
    send = watch.wrap("send", wires.to_frontend)
    sampling = SamplingParams(max_new_tokens=steps + warmup + 50, ignore_eos=True)
    events: list[Event] = [
        GenerateRequest(rid=rid, input_ids=_prompt(rid), sampling=sampling)
        for rid in range(running)
    ]
    in_flight: list[Plan] = []
    gc.collect()
    while True:
        step = step_once(events, time.monotonic())
        for index, message in step.outputs.items():
            send(index, message)
        assert step.plan is not None
        build(step.plan)
        in_flight.append(step.plan)
        events = []
        if len(in_flight) > 1:
            done = in_flight.pop(0)
            events = [StepResult(done.step_id, [7] * len(done.requests), {})]
        frontend.drain()
        if scheduler.stats.decode_steps == warmup + steps:
            break
    cost = {name: watch.median_us(name, steps) for name in watch.calls}
    return StepCost(
        running=running,
        commit=cost["commit"],
        plan=cost["plan"],
        build=cost["build"],
        send=cost["send"],
        other=cost["step"] - cost["commit"] - cost["plan"],
    )


def _create_scheduler(running: int, steps: int) -> Scheduler:
    tokens = PROMPT_TOKENS + steps + 100
    limits = EngineLimits(
        num_pages=running * (tokens // PAGE_SIZE + 2) + 1,
        page_size=PAGE_SIZE,
        max_running_requests=running,
        context_length=tokens,
        chunked_prefill_size=8192,
        vocab_size=1000,
        eos_token_ids=(2,),
    )
    return Scheduler(SchedulerConfig(max_queue=running), limits, num_frontends=1)


def _prompt(rid: int) -> list[int]:
    return [(rid * 7 + position * 31) % 1000 for position in range(PROMPT_TOKENS)]


def table(costs: list[StepCost]) -> str:
    lines = ["| running | commit | plan | build | send | other | total us/step | us/token |"]
    lines.append("|---|---|---|---|---|---|---|---|")
    for cost in costs:
        parts = (cost.commit, cost.plan, cost.build, cost.send, cost.other, cost.total)
        row = " | ".join(f"{part:.0f}" for part in parts)
        lines.append(f"| {cost.running} | {row} | {cost.total / cost.running:.2f} |")
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="duograph bench scheduler", description=__doc__)
    parser.add_argument("--running", type=int, nargs="+", default=DEFAULT_SIZES, metavar="N")
    parser.add_argument("--steps", type=int, default=400)
    options = parser.parse_args(list(arguments))
    if min(options.running) < 1 or options.steps < 1:
        parser.error("--running and --steps must be at least 1")
    print(table([measure(size, steps=options.steps) for size in options.running]))
    return ExitCode.OK
