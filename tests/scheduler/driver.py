"""A scheduler and a device that answers at once, for tests of single rules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from duograph.runners.sampling_params import SamplingParams
from duograph.scheduler.admission import EngineLimits
from duograph.scheduler.config import SchedulerConfig
from duograph.scheduler.messages import AbortRequest, Finished, GenerateRequest
from duograph.scheduler.scheduler import Scheduler
from duograph.scheduler.step import Event, Plan, Step

LIMITS = EngineLimits(
    num_pages=33,
    page_size=4,
    max_running_requests=4,
    context_length=64,
    chunked_prefill_size=16,
    vocab_size=100,
    eos_token_ids=(2,),
)


@dataclass
class Answer:
    step_id: int
    tokens: list[int]
    logprobs: dict[int, Any] = field(default_factory=dict)
    prompt_logprobs: dict[int, Any] = field(default_factory=dict)


def constant(_plan: Plan, _index: int) -> int:
    return 7


class Driver:
    """Plain loop, one call of ``step`` at a time; ``token`` chooses what is sampled."""

    def __init__(
        self,
        config: SchedulerConfig | None = None,
        *,
        token: Callable[[Plan, int], int] = constant,
        frontends: int = 1,
        **limits: Any,
    ) -> None:
        self.scheduler = Scheduler(
            config or SchedulerConfig(), replace(LIMITS, **limits), frontends
        )
        self.now = 0.0
        self.plans: list[Plan] = []
        self.tokens: dict[int, list[int]] = {}
        self.finished: dict[int, Finished] = {}
        self._token = token
        self._results: list[Event] = []

    def step(self, *events: Event, seconds: float = 0.01) -> Step:
        self.now += seconds
        step = self.scheduler.step([*self._results, *events], self.now)
        self._results = []
        for message in step.outputs.values():
            for rid, token in zip(message.rids, message.tokens, strict=True):
                self.tokens.setdefault(rid, []).append(token)
            for finished in message.finished:
                assert finished.rid not in self.finished
                self.finished[finished.rid] = finished
        self.scheduler.queues.check()
        if step.plan is not None:
            self.plans.append(step.plan)
            tokens = [self._token(step.plan, i) for i in range(len(step.plan.requests))]
            self._results = [Answer(step.plan.step_id, tokens)]
        return step

    def run(self, *events: Event, limit: int = 2_000) -> None:
        self.step(*events)
        for _ in range(limit):
            if self.scheduler.is_idle and not self._results:
                return
            self.step()
        raise AssertionError(f"not idle after {limit} steps")

    def abort(self, rid: int) -> Step:
        return self.step(AbortRequest(rid))


def request(
    rid: int = 1, prompt: list[int] | int = 5, new: int = 4, salt: str = "", **sampling: Any
) -> GenerateRequest:
    ids = [10 + (rid + i) % 80 for i in range(prompt)] if isinstance(prompt, int) else prompt
    params = SamplingParams(max_new_tokens=new, **sampling)
    return GenerateRequest(rid=rid, input_ids=ids, sampling=params, cache_salt=salt)
