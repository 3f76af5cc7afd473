"""Repeatable traffic of every kind for a whole engine in process: bursts, chunks, aborts,
retraction, every way of sampling. Shared by the tests of the scheduler floor and of tests/gpu."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from duograph.runners.batch import ForwardBatch
from duograph.runners.sampling_params import SamplingParams
from duograph.runners.worker import ModelWorker
from duograph.scheduler.admission import MINIMUM_RATIO, EngineLimits, OutputEstimate
from duograph.scheduler.batch_builder import BatchBuilder
from duograph.scheduler.config import SchedulerConfig
from duograph.scheduler.loop import PendingStep, overlap_loop, plain_loop
from duograph.scheduler.messages import AbortRequest, GenerateRequest, Logprobs
from duograph.scheduler.scheduler import Scheduler
from duograph.scheduler.step import Event, Plan, Step

SECONDS_A_TURN = 1e-3


@dataclass(slots=True)
class Answer:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)  # of requests that want them
    reason: str = ""  # "" while it runs, and after an abort


def engine_limits(worker: ModelWorker, vocab_size: int) -> EngineLimits:
    """What ``load_worker`` would say of ``worker``, for a model without an end token."""
    limits = worker.limits
    return EngineLimits(
        num_pages=limits.num_pages,
        page_size=limits.page_size,
        max_running_requests=limits.max_running_requests,
        context_length=limits.context_length,
        chunked_prefill_size=limits.chunked_prefill_size,
        vocab_size=vocab_size,
        eos_token_ids=(),
    )


class Optimist(OutputEstimate):
    """Never learns that requests write all they may: too many are let in and some retracted."""

    @property
    def ratio(self) -> float:
        return MINIMUM_RATIO


class TrafficEngine:
    """``loop.EngineParts`` over a worker, with a clock that ticks once a turn of the loop.

    Attributes:
        answers: by request id.
        shapes: of every step, in order: "extend" or "decode", requests, tokens.
    """

    def __init__(
        self, worker: ModelWorker, vocab_size: int, config: SchedulerConfig | None = None
    ) -> None:
        self.config = config or SchedulerConfig()
        limits = engine_limits(worker, vocab_size)
        self.scheduler = Scheduler(self.config, limits, num_frontends=1)
        self.scheduler.queues.estimate = Optimist()
        self.answers: dict[int, Answer] = {}
        self.shapes: list[tuple[str, int, int]] = []
        self._worker = worker
        self._builder = BatchBuilder(
            page_size=limits.page_size, pinned=worker.device.type == "cuda"
        )
        self._traffic: list[list[Event]] = []
        self._turn = 0

    def run(self, traffic: Sequence[list[Event]]) -> None:
        """Events by turn of the loop; returns when all of it is over."""
        self._traffic = list(reversed(traffic))
        loop = plain_loop if self.config.disable_overlap_schedule else overlap_loop
        loop(self)

    def ask(self, rid: int, prompt: list[int], sampling: SamplingParams, salt: str) -> Answer:
        """One request alone, to its end. With a ``salt`` of its own it finds nothing cached."""
        self.run([[GenerateRequest(rid=rid, input_ids=prompt, sampling=sampling, cache_salt=salt)]])
        return self.answers[rid]

    # The verbs of the loops

    def alive(self) -> bool:
        return bool(self._traffic) or not self.scheduler.is_idle

    def now(self) -> float:
        self._turn += 1
        return self._turn * SECONDS_A_TURN

    def receive(self, *, block: bool) -> list[Event]:
        events = self._traffic.pop() if self._traffic else []
        for event in events:
            if isinstance(event, GenerateRequest):
                self.answers[event.rid] = Answer()
        return events

    def build(self, plan: Plan) -> ForwardBatch:
        kind = "extend" if plan.is_extend else "decode"
        self.shapes.append((kind, len(plan.rows), plan.num_tokens))
        return self._builder.build(plan)

    def launch(self, batch: ForwardBatch) -> PendingStep:
        return self._worker.launch(batch)

    def send(self, step: Step) -> None:
        for message in step.outputs.values():
            found = message.logprobs or {}
            for index, (rid, token) in enumerate(zip(message.rids, message.tokens, strict=True)):
                self.answers[rid].tokens.append(token)
                if index in found:
                    self.answers[rid].logprobs.append(found[index])
            for finished in message.finished:
                self.answers[finished.rid].reason = finished.reason
        if self.scheduler.fault_log:
            raise self.scheduler.fault_log[0][1]


def any_sampling(rng: random.Random, vocab: int) -> SamplingParams:
    """Half greedy, half seeded; filters, penalties, bias, bans and logprobs now and then."""
    return SamplingParams(
        max_new_tokens=rng.randint(10, 60),
        min_new_tokens=rng.choice((0, 0, 1)),
        temperature=rng.choice((0.0, 0.0, 0.7, 1.2)),
        seed=rng.getrandbits(40),
        top_k=rng.choice((-1, -1, 1, 7, vocab)),
        top_p=rng.choice((1.0, 1.0, 0.9, 0.3)),
        min_p=rng.choice((0.0, 0.0, 0.0, 0.1)),
        presence_penalty=rng.choice((0.0, 0.0, 0.0, 0.6)),
        frequency_penalty=rng.choice((0.0, 0.0, 0.0, -0.4)),
        repetition_penalty=rng.choice((1.0, 1.0, 1.0, 1.3)),
        logit_bias=rng.choice(({}, {}, {}, {rng.randrange(vocab): 5.0})),
        stop_token_ids=rng.choice(((), (rng.randrange(vocab),))),
        logprobs=rng.choice((None, None, 0, 5)),
        prompt_logprobs=rng.choice((None, None, None, None, None, 2)),
    )


def mixed_traffic(
    turns: int, *, vocab: int, longest: int, arrivals: float, seed: int = 0, first_id: int = 0
) -> list[list[Event]]:
    """``arrivals`` new requests a turn on average, in bursts of up to four, prompts of up to
    ``longest`` tokens, a third of which begin alike; one in eight is aborted within 30 turns."""
    rng = random.Random(seed)
    shared = [rng.randrange(vocab) for _ in range(longest)]
    traffic: list[list[Event]] = [[] for _ in range(turns)]
    rid = first_id
    for turn in range(turns):
        if rng.random() >= arrivals / 2.5:
            continue
        for _ in range(rng.randint(1, 4)):
            prompt = [rng.randrange(vocab) for _ in range(rng.randint(1, longest))]
            if rng.random() < 1 / 3:
                same = rng.randint(1, len(prompt))
                prompt[:same] = shared[:same]
            sampling = any_sampling(rng, vocab)
            traffic[turn].append(GenerateRequest(rid=rid, input_ids=prompt, sampling=sampling))
            if rng.random() < 1 / 8:
                at = min(turns - 1, turn + rng.randint(1, 30))
                traffic[at].append(AbortRequest(rid=rid))
            rid += 1
    return traffic
