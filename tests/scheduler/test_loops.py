"""Both loops over the real scheduler and builder, with a fake worker and no sockets."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from duograph.runners.batch import ForwardBatch
from duograph.runners.sampling_params import SamplingParams
from duograph.scheduler.batch_builder import BatchBuilder
from duograph.scheduler.config import SchedulerConfig
from duograph.scheduler.loop import EngineParts, PendingStep, overlap_loop, plain_loop
from duograph.scheduler.messages import AbortRequest, Finished, GenerateRequest
from duograph.scheduler.scheduler import Scheduler
from duograph.scheduler.step import Event, Plan, Step
from duograph.tests.scheduler.fake_worker import LIMITS, FakeWorker, token_at

Loop = Callable[[EngineParts], None]


class Bench:
    """An engine whose frontends are a script: events by the turn in which they arrive."""

    def __init__(self, script: dict[int, list[Event]], worker: FakeWorker) -> None:
        self.scheduler = Scheduler(SchedulerConfig(), LIMITS, num_frontends=1)
        self.worker = worker
        self.tokens: dict[int, list[int]] = {}
        self.finished: dict[int, Finished] = {}
        self.blocked = 0
        self.order: list[str] = []
        self._script = dict(script)
        self._turn = 0
        self._builder = BatchBuilder(page_size=LIMITS.page_size, pinned=False)

    def alive(self) -> bool:
        return not (self.scheduler.is_idle and not self._script and self._turn)

    def now(self) -> float:
        return float(self._turn)

    def receive(self, *, block: bool) -> list[Event]:
        self._turn += 1
        self.blocked += block
        return self._script.pop(self._turn, [])

    def build(self, plan: Plan) -> ForwardBatch:
        return self._builder.build(plan)

    def launch(self, batch: ForwardBatch) -> PendingStep:
        return self.worker.launch(batch)

    def send(self, step: Step) -> None:
        for message in step.outputs.values():
            for rid, token in zip(message.rids, message.tokens, strict=True):
                self.tokens.setdefault(rid, []).append(token)
            for finished in message.finished:
                assert finished.rid not in self.finished
                self.finished[finished.rid] = finished


def request(rid: int, *, prompt: int, new: int, stop: tuple[int, ...] = ()) -> GenerateRequest:
    sampling = SamplingParams(max_new_tokens=new, seed=rid, stop_token_ids=stop)
    return GenerateRequest(
        rid=rid, input_ids=[(rid + i) % 50 for i in range(prompt)], sampling=sampling
    )


def mixed_script() -> dict[int, list[Event]]:
    stop = token_at(3, 20 + 4)  # request 3 stops after five tokens
    return {
        1: [request(1, prompt=5, new=30), request(2, prompt=50, new=12)],
        3: [request(3, prompt=20, new=40, stop=(stop,)), request(4, prompt=9, new=1)],
        4: [request(5, prompt=60, new=60), request(6, prompt=33, new=25)],
        12: [AbortRequest(5)],
        15: [request(7, prompt=8, new=20)],
        200: [request(8, prompt=8, new=3)],
    }


@pytest.mark.parametrize("loop", [plain_loop, overlap_loop])
def test_every_request_gets_its_own_tokens(loop: Loop) -> None:
    bench = Bench(mixed_script(), FakeWorker())
    loop(bench)
    assert bench.finished.keys() == {1, 2, 3, 4, 6, 7, 8}
    for rid, prompt, count in ((1, 5, 30), (2, 50, 12), (3, 20, 5), (4, 9, 1), (6, 33, 25)):
        wanted = [token_at(rid, prompt + i) for i in range(count)]
        assert bench.tokens[rid] == wanted
        assert bench.finished[rid].completion_tokens == count
    assert bench.finished[3].reason == "stop" and bench.finished[1].reason == "length"
    bench.scheduler.queues.check()


def test_plain_and_overlap_give_the_same_tokens() -> None:
    plain, overlap = Bench(mixed_script(), FakeWorker()), Bench(mixed_script(), FakeWorker())
    plain_loop(plain)
    overlap_loop(overlap)
    aborted = 5
    assert {rid: t for rid, t in plain.tokens.items() if rid != aborted} == {
        rid: t for rid, t in overlap.tokens.items() if rid != aborted
    }
    assert plain.finished == overlap.finished


def order_of(loop: Loop) -> list[tuple[str, int]]:
    """What happens to each step, in order, for one request of ten tokens."""
    worker = FakeWorker()
    happened: list[tuple[str, int]] = []
    launch = worker.launch

    def record(batch: ForwardBatch) -> PendingStep:
        happened.append(("launch", batch.step_id))
        pending = launch(batch)
        wait = pending.wait

        def record_wait():  # type: ignore[no-untyped-def]
            happened.append(("wait", batch.step_id))
            return wait()

        pending.wait = record_wait  # type: ignore[method-assign]
        return pending

    worker.launch = record  # type: ignore[method-assign, assignment]
    loop(Bench({1: [request(1, prompt=3, new=10)]}, worker))
    return happened


def test_the_plain_loop_reads_each_result_before_the_next_launch() -> None:
    expected = [(verb, step) for step in range(10) for verb in ("launch", "wait")]
    assert order_of(plain_loop) == expected


def test_the_overlap_loop_launches_one_step_ahead_and_no_step_for_a_foreseen_length() -> None:
    happened = order_of(overlap_loop)
    assert [step for verb, step in happened if verb == "launch"] == list(range(10))
    for step in range(9):
        assert happened.index(("launch", step + 1)) < happened.index(("wait", step))


@pytest.mark.parametrize("loop", [plain_loop, overlap_loop])
def test_tokens_are_sent_before_the_next_step_is_planned(loop: Loop) -> None:
    worker = FakeWorker()
    bench = Bench({1: [request(1, prompt=3, new=10)]}, worker)
    seen: list[tuple[int, int]] = []  # tokens sent, results read, at each plan
    plan = bench.scheduler.plan

    def record() -> Step:
        seen.append((len(bench.tokens.get(1, [])), len(worker.waited)))
        return plan()

    bench.scheduler.plan = record  # type: ignore[method-assign]
    loop(bench)
    assert len(seen) >= 10 and all(sent == read for sent, read in seen)


@pytest.mark.parametrize("loop", [plain_loop, overlap_loop])
def test_who_cannot_be_planned_is_told_at_once(loop: Loop) -> None:
    bench = Bench({1: [request(1, prompt=3, new=10)]}, FakeWorker())

    def broken(*_: object) -> None:
        raise KeyError("a bug")

    bench.scheduler.queues.kv.cost = broken  # type: ignore[method-assign, assignment]
    loop(bench)
    assert bench.finished[1].error_code == "internal"
    assert bench.now() == 1.0, "in the turn in which it came"


def test_an_eos_finish_wastes_one_row_in_overlap_and_none_in_plain() -> None:
    stop = token_at(1, 3 + 4)
    for loop, wasted in ((plain_loop, 0), (overlap_loop, 1)):
        bench = Bench({1: [request(1, prompt=3, new=10, stop=(stop,))]}, FakeWorker())
        loop(bench)
        assert bench.scheduler.stats.wasted_rows == wasted
        assert len(bench.tokens[1]) == 5


@pytest.mark.parametrize("loop", [plain_loop, overlap_loop])
def test_an_idle_engine_blocks_and_a_busy_one_never_does(loop: Loop) -> None:
    bench = Bench({5: [request(1, prompt=3, new=10)], 60: []}, FakeWorker())
    loop(bench)
    busy_turns = len(bench.worker.launched)
    assert bench.blocked >= 60 - busy_turns - 3


@pytest.mark.parametrize("loop", [plain_loop, overlap_loop])
def test_a_device_error_leaves_the_loop(loop: Loop) -> None:
    bench = Bench({1: [request(1, prompt=3, new=10)]}, FakeWorker(fail_at_step=4))
    with pytest.raises(RuntimeError, match="device-side assert"):
        loop(bench)
    bench.send(bench.scheduler.fail_all("the engine failed"))
    assert bench.finished[1].error_code == "internal"
