"""Orders to a running engine: abort by name, flush the cache; and the priority policy."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from duograph.runners.config import MAX_PROFILED_STEPS
from duograph.runners.profiler import ProfilerError, StepProfiler
from duograph.runners.sampling_params import SamplingParams
from duograph.scheduler.config import SchedulerConfig
from duograph.scheduler.messages import GenerateRequest
from duograph.tests.scheduler.driver import Driver, request
from duograph.tests.worker_driver import WorkerDriver, make_worker


def named(rid: int, name: str, *, new: int = 20, priority: int = 0) -> GenerateRequest:
    return replace(request(rid, new=new), name=name, priority=priority)


def test_an_abort_by_name_ends_those_of_that_name_with_an_error() -> None:
    driver = Driver()
    driver.step(named(1, "a"), named(2, "b"), named(3, "a"))
    driver.step()
    assert driver.scheduler.abort_by_client("a") == 2
    assert driver.scheduler.abort_by_client("nobody") == 0
    driver.run()
    codes = {rid: finished.error_code for rid, finished in driver.finished.items()}
    assert codes == {1: "aborted", 2: None, 3: "aborted"}
    assert driver.scheduler.stats.aborted == 2


def test_an_abort_of_all_reaches_the_waiting_ones_too() -> None:
    driver = Driver(max_running_requests=2)
    driver.step(*(named(rid, "") for rid in range(1, 6)))
    driver.step()
    assert driver.scheduler.abort_by_client(None) == 5
    driver.run()
    assert [finished.error_code for finished in driver.finished.values()] == ["aborted"] * 5
    assert driver.scheduler.is_idle


def test_the_cache_is_flushed_only_while_nothing_runs() -> None:
    driver = Driver()
    driver.step(request(1, prompt=20))
    assert driver.scheduler.flush_cache() is None
    driver.run()
    tree = driver.scheduler.queues.kv.tree
    held = tree.cached_pages
    assert held >= 5
    assert driver.scheduler.flush_cache() == held
    assert tree.cached_pages == 0
    driver.run(request(2, prompt=20))
    assert driver.finished[2].cached_tokens == 0


def order_of(policy: str, priorities: list[int]) -> list[int]:
    driver = Driver(SchedulerConfig(schedule_policy=policy), max_running_requests=1)
    arrivals = [named(rid, "", new=2, priority=p) for rid, p in enumerate(priorities, 1)]
    driver.run(*arrivals)
    return list(driver.finished)


def test_a_smaller_priority_goes_first_under_that_policy_alone() -> None:
    assert order_of("priority", [5, 0, -3, 0]) == [3, 2, 4, 1]
    assert order_of("fcfs", [5, 0, -3, 0]) == [1, 2, 3, 4]


def test_the_first_token_says_how_much_was_cached() -> None:
    driver = Driver()
    driver.run(request(1, prompt=20))
    found: dict[int, int] = {}
    again = replace(request(1, prompt=20), rid=2)
    for events in ([again], [], [], []):
        for message in driver.step(*events).outputs.values():
            found |= message.cached or {}
    assert found == {2: 16}


def test_a_profile_holds_the_operators_of_its_steps(tmp_path: Path) -> None:
    worker = make_worker(capture=False, profile_dir=str(tmp_path))
    driver = WorkerDriver(worker)
    worker.profiler.start()
    with pytest.raises(ProfilerError, match="stop it first"):
        worker.profiler.start()
    driver.start({1: 8})
    worker.launch(driver.decode([1])).wait()
    assert worker.profiler.stop().startswith("2 steps")
    worker.close()
    [trace] = tmp_path.glob("*.trace.json")
    assert "aten::linear" in trace.read_text()
    with pytest.raises(ProfilerError, match="start one"):
        worker.profiler.stop()


def test_a_profile_takes_as_many_steps_as_asked_for(tmp_path: Path) -> None:
    profiler = StepProfiler(str(tmp_path), lambda work: work())
    with pytest.raises(ProfilerError, match="1 to"):
        profiler.start(MAX_PROFILED_STEPS + 1)
    profiler.start(2)
    profiler.step()
    assert not list(tmp_path.iterdir())
    profiler.step()
    profiler.join()
    assert len(list(tmp_path.glob("*.trace.json"))) == 1


def test_a_forgotten_profile_ends_by_itself(tmp_path: Path) -> None:
    profiler = StepProfiler(str(tmp_path), lambda work: work())
    profiler.start()
    for _ in range(MAX_PROFILED_STEPS):
        torch.zeros(1)
        profiler.step()
    profiler.join()
    assert len(list(tmp_path.glob("*.trace.json"))) == 1
    with pytest.raises(ProfilerError):
        profiler.stop()


def test_a_prompt_that_is_scored_without_output_must_fit_alone() -> None:
    driver = Driver(context_length=8)
    scoring = SamplingParams(max_new_tokens=0, prompt_logprobs=0)
    driver.run(GenerateRequest(rid=1, input_ids=[5] * 8, sampling=scoring))
    assert (driver.finished[1].reason, driver.finished[1].completion_tokens) == ("length", 0)
    assert 1 not in driver.tokens
