"""Single rules of Scheduler.step. Whole histories are in test_simulator.py."""

from __future__ import annotations

import math
from typing import Any

import pytest

from duograph.scheduler.config import SchedulerConfig
from duograph.scheduler.messages import RID_FRONTEND_SHIFT, AbortRequest, GenerateRequest
from duograph.scheduler.planner import MAX_EXTENDS_IN_A_ROW
from duograph.scheduler.policy import MAX_RETRACTIONS
from duograph.scheduler.scheduler import EngineFault
from duograph.scheduler.step import Plan
from duograph.tests.scheduler.driver import Answer, Driver, request

# At the door


@pytest.mark.parametrize(
    ("wrong", "code", "words"),
    [
        (request(prompt=[]), "invalid_request", "empty"),
        (request(prompt=[1, 100]), "invalid_request", "token 100 is not in [0, 100)"),
        (request(prompt=[-1]), "invalid_request", "token -1"),
        (request(prompt=[2**63]), "invalid_request", str(2**63)),
        (request(temperature=math.nan), "invalid_request", "temperature"),
        (request(top_p=0.0), "invalid_request", "top_p"),
        (request(stop_token_ids=(100,)), "invalid_request", "stop_token_ids"),
        (request(logit_bias={5: 101.0}), "invalid_request", "logit_bias"),
        (request(new=4, min_new_tokens=5), "invalid_request", "min_new_tokens"),
        (request(prompt=61, new=4), "context_length_exceeded", "61 + 4 = 65"),
        (request(prompt=64, new=1), "context_length_exceeded", "holds 64"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused_with_its_reason(
    wrong: GenerateRequest, code: str, words: str
) -> None:
    driver = Driver()
    driver.run(wrong, request(2))
    assert driver.finished[1].reason == "error"
    assert driver.finished[1].error_code == code
    assert words in driver.finished[1].error_message
    assert driver.finished[2].reason == "length", "nothing else is disturbed"


def test_a_request_that_fits_the_context_but_not_the_pool_is_refused_with_both_numbers() -> None:
    driver = Driver(num_pages=9)  # 32 tokens
    driver.run(request(1, prompt=20, new=13), request(2, prompt=20, new=12))
    assert driver.finished[1].error_code == "context_length_exceeded"
    assert "20 + 13 = 33" in driver.finished[1].error_message
    assert "32" in driver.finished[1].error_message
    assert driver.finished[2].reason == "length"


def test_the_last_token_of_the_context_is_served() -> None:
    driver = Driver()
    driver.run(request(prompt=63, new=1))
    assert driver.finished[1].reason == "length" and driver.tokens[1] == [7]


def test_no_new_tokens_ends_at_once() -> None:
    driver = Driver()
    step = driver.step(request(new=0))
    assert step.plan is None and driver.finished[1].reason == "length"
    assert driver.finished[1].completion_tokens == 0


def test_a_full_queue_refuses_and_what_was_accepted_goes_on() -> None:
    driver = Driver(SchedulerConfig(max_queue=2), max_running_requests=1)
    driver.step(request(1), request(2), request(3), request(4))
    assert driver.finished[4].error_code == "overloaded"
    driver.run()
    assert {driver.finished[rid].reason for rid in (1, 2, 3)} == {"length"}


def test_a_duplicate_id_and_a_stranger_are_ignored() -> None:
    driver = Driver(frontends=1)
    stranger = request(1 << RID_FRONTEND_SHIFT)
    driver.run(request(1), request(1, prompt=9), stranger, request(-5), AbortRequest(99))
    assert driver.finished.keys() == {1} and driver.tokens[1] == [7] * 4
    assert driver.scheduler.stats.ignored == 3


def test_messages_go_to_the_frontend_that_asked() -> None:
    driver = Driver(frontends=3)
    rids = [index << RID_FRONTEND_SHIFT | 5 for index in range(3)]
    driver.step(*[request(rid, prompt=4) for rid in rids])
    step = driver.step()
    assert {index: box.rids for index, box in step.outputs.items()} == {
        index: [rid] for index, rid in enumerate(rids)
    }


# Endings


def tokens_in_turn(*tokens: int):  # type: ignore[no-untyped-def]
    def token(plan: Plan, index: int) -> int:
        return tokens[min(len(plan.requests[index].output_ids), len(tokens) - 1)]

    return token


@pytest.mark.parametrize(
    ("sampling", "count", "matched"),
    [
        ({}, 3, 2),
        ({"ignore_eos": True}, 5, 9),  # eos is an ordinary token; 9 is the stop id after it
        ({"ignore_eos": True, "stop_token_ids": ()}, 8, None),
        ({"stop_token_ids": (4,)}, 1, 4),
        ({"stop_token_ids": (4,), "min_new_tokens": 2}, 3, 2),  # 4 comes too early to count
    ],
)
def test_eos_and_stop_ids(sampling: dict[str, Any], count: int, matched: int | None) -> None:
    driver = Driver(token=tokens_in_turn(4, 5, 2, 6, 9, 8, 8, 8))
    driver.run(request(new=8, **{"stop_token_ids": (9,), **sampling}))
    finished = driver.finished[1]
    assert finished.completion_tokens == count == len(driver.tokens[1])
    assert finished.matched_token == matched
    assert finished.reason == ("length" if matched is None else "stop")


def test_min_new_tokens_bans_eos_and_stop_ids_until_it_is_reached() -> None:
    driver = Driver()
    driver.run(request(new=6, min_new_tokens=3, stop_token_ids=(9,), logit_bias={5: 1.5}))
    banned = [sorted(t for t, b in p.bias[0].items() if b == -math.inf) for p in driver.plans]
    assert banned == [[2, 9]] * 3 + [[]] * 3
    assert all(plan.bias[0][5] == 1.5 for plan in driver.plans)


def test_a_token_outside_the_vocabulary_ends_only_its_own_request() -> None:
    def token(plan: Plan, index: int) -> int:
        return -1 if plan.requests[index].rid == 1 else 7

    driver = Driver(token=token)
    driver.run(request(1), request(2))
    assert driver.finished[1].error_code == "internal"
    assert driver.finished[2].reason == "length"


def test_three_faults_within_a_minute_end_the_engine_and_three_in_two_minutes_do_not() -> None:
    for pause, survives in ((1.0, False), (45.0, True)):
        driver = Driver(token=lambda *_: 100)
        driver.run(request(1))
        driver.step(request(2), seconds=pause)
        driver.step()
        driver.step(request(3), seconds=pause)
        if survives:
            driver.step()
            assert driver.finished.keys() == {1, 2, 3}
        else:
            with pytest.raises(EngineFault, match="3 requests failed"):
                driver.step()


def test_a_result_of_the_wrong_step_or_size_ends_the_engine() -> None:
    driver = Driver()
    driver.step(request())
    with pytest.raises(EngineFault, match="result of step 9"):
        driver.scheduler.step([Answer(9, [7])], 1.0)
    driver = Driver()
    driver.step(request())
    with pytest.raises(EngineFault, match="number of tokens"):
        driver.scheduler.step([Answer(0, [7, 7])], 1.0)


def test_fail_all_gives_everyone_a_last_word() -> None:
    driver = Driver(max_running_requests=1)
    driver.step(request(1), request(2))
    step = driver.scheduler.fail_all("over")
    assert [f.rid for f in step.outputs[0].finished] == [1, 2]
    assert {f.error_code for f in step.outputs[0].finished} == {"internal"}


# Time


def test_a_request_that_waits_too_long_is_answered_and_the_running_one_is_not() -> None:
    driver = Driver(SchedulerConfig(queue_timeout=10), max_running_requests=1)
    driver.step(request(1, new=50), request(2))
    driver.step(seconds=11)
    assert driver.finished[2].error_code == "timeout"
    driver.run()
    assert driver.finished[1].reason == "length"


def test_a_request_that_takes_too_long_is_ended() -> None:
    driver = Driver(SchedulerConfig(request_timeout=10))
    driver.step(request(1, new=50))
    driver.step()
    driver.step(seconds=11)
    assert driver.finished[1].error_code == "timeout"
    assert driver.finished[1].completion_tokens == len(driver.tokens[1]) > 0


def test_a_clock_that_jumps_back_times_nobody_out() -> None:
    driver = Driver()
    driver.now = 1e6
    driver.step(request(1, new=30))
    driver.step(seconds=-9e5)
    driver.step(request(2), seconds=-5)
    driver.run()
    assert {f.reason for f in driver.finished.values()} == {"length"}


# Prefill


def test_prompts_share_the_token_budget_of_a_step_and_are_cut_at_its_edge() -> None:
    driver = Driver()
    driver.step(request(1, prompt=10), request(2, prompt=10), request(3, prompt=3))
    first = driver.plans[0]
    assert [r.rid for r in first.requests] == [1, 2]
    assert (first.starts, first.seq_lens, first.emits) == ([0, 0], [10, 6], [True, False])
    driver.step()
    second = driver.plans[1]
    assert [r.rid for r in second.requests] == [2, 3] and second.starts == [6, 0]


def test_a_decode_waits_for_two_prefill_steps_at_most() -> None:
    driver = Driver(num_pages=200)
    driver.step(request(1, prompt=4, new=40))
    rid = 10
    kinds = ""
    for _ in range(24):
        rid += 1
        driver.step(request(rid, prompt=30, new=1))
        kinds += "E" if driver.plans[-1].is_extend else "D"
    assert "E" * (MAX_EXTENDS_IN_A_ROW + 1) not in kinds and "DD" not in kinds


def test_a_free_place_is_taken_in_the_very_next_step() -> None:
    driver = Driver(max_running_requests=1)
    driver.step(request(1, new=1), request(2, new=1))
    driver.step()
    assert [r.rid for r in driver.plans[1].requests] == [2]


def test_a_known_prefix_is_not_computed_again_but_for_its_last_token() -> None:
    driver = Driver()
    driver.run(request(1, prompt=list(range(10, 26))))
    driver.run(request(2, prompt=list(range(10, 26))))
    driver.run(request(3, prompt=[*range(10, 18), 5, 5]))
    assert [driver.finished[rid].cached_tokens for rid in (1, 2, 3)] == [0, 12, 8]


def test_another_salt_sees_nothing_of_a_prefix() -> None:
    driver = Driver()
    driver.run(request(1, prompt=list(range(10, 26)), salt="a"))
    driver.run(request(2, prompt=list(range(10, 26)), salt="b"))
    driver.run(request(3, prompt=list(range(10, 26)), salt="a"))
    assert [driver.finished[rid].cached_tokens for rid in (1, 2, 3)] == [0, 0, 12]


def test_without_the_cache_nothing_is_shared_or_kept() -> None:
    driver = Driver(SchedulerConfig(disable_radix_cache=True))
    prompt = list(range(10, 26))
    driver.run(request(1, prompt=prompt))
    driver.run(request(2, prompt=prompt))
    assert driver.finished[2].cached_tokens == 0
    assert driver.scheduler.queues.kv.pool.num_free == 32


def test_the_pages_of_an_aborted_request_do_not_enter_the_cache() -> None:
    driver = Driver(chunked_prefill_size=4)
    prompt = list(range(10, 26))
    driver.step(request(1, prompt=prompt))
    driver.step()
    driver.abort(1)
    driver.run(request(2, prompt=prompt))
    assert 1 not in driver.finished and driver.finished[2].cached_tokens == 0


def test_lpm_takes_the_longest_known_prefix_first_but_lets_nobody_starve() -> None:
    def served(policy: str) -> list[int]:
        driver = Driver(SchedulerConfig(schedule_policy=policy), max_running_requests=1)
        known = list(range(10, 26))
        driver.run(request(1, prompt=known, new=1))
        driver.step(request(2, prompt=16), request(3, prompt=[*known, 5], new=1))
        return [r.rid for r in driver.plans[-1].requests]

    assert served("fcfs") == [2]
    assert served("lpm") == [3]


def test_lpm_serves_an_overtaken_request_after_a_while() -> None:
    driver = Driver(SchedulerConfig(schedule_policy="lpm"), max_running_requests=1)
    known = list(range(10, 26))
    driver.run(request(1, prompt=known, new=1))
    driver.step(request(2, prompt=16, new=1), request(3, prompt=[*known, 5], new=1))
    for rid in range(4, 60):
        driver.step(request(rid, prompt=[*known, 5], new=1))
        if 2 in driver.finished:
            return
    raise AssertionError("request 2 was overtaken for ever")


# Retraction


def test_when_pages_run_out_somebody_is_computed_again_and_loses_nothing() -> None:
    driver = Driver(num_pages=13, token=lambda plan, i: 10 + plan.seq_lens[i] % 50)
    driver.scheduler.queues.estimate._mean = 0.0
    events = [request(rid, prompt=8, new=24) for rid in (1, 2, 3, 4)]
    driver.run(*events)
    assert driver.scheduler.queues.retractions > 0
    for rid in (1, 2, 3, 4):
        assert driver.tokens[rid] == [10 + (8 + i) % 50 for i in range(24)]


def test_nobody_is_retracted_for_ever() -> None:
    driver = Driver(num_pages=13, token=lambda plan, i: 10 + plan.seq_lens[i] % 50)
    driver.scheduler.queues.estimate._mean = 0.0
    live = []
    for rid in range(40):
        driver.step(request(rid, prompt=8, new=24))
        live += [r for r in driver.scheduler.live.values() if r not in live]
    driver.run()
    assert {f.reason for f in driver.finished.values()} == {"length"}
    assert max(r.retractions for r in live) <= MAX_RETRACTIONS + 1


def test_an_aborted_request_leaves_within_one_step() -> None:
    driver = Driver()
    driver.step(request(1, prompt=20, new=20))
    driver.step()
    driver.step()
    driver.abort(1)
    kv = driver.scheduler.queues.kv
    assert not driver.scheduler.live and kv.available == kv.pool.num_usable
    assert 1 not in driver.finished, "nobody waits for an answer"


def test_of_many_choices_the_first_computes_the_prompt_for_all() -> None:
    prompt = [10 + i % 80 for i in range(50)]
    driver = Driver(num_pages=200, chunked_prefill_size=64)
    driver.step(*[request(rid, prompt=prompt) for rid in (1, 2, 3)], request(9, prompt=8))
    assert [r.rid for r in driver.plans[0].requests] == [1, 9], "a stranger does not wait"
    driver.run()
    assert [driver.finished[rid].cached_tokens for rid in (1, 2, 3)] == [0, 48, 48]
    assert {f.reason for f in driver.finished.values()} == {"length"}


def test_choices_do_not_wait_when_they_would_share_little_or_nothing() -> None:
    short = [10 + i for i in range(20)]
    driver = Driver(chunked_prefill_size=64, num_pages=200)
    driver.step(request(1, prompt=short), request(2, prompt=short))
    assert [r.rid for r in driver.plans[0].requests] == [1, 2]
    long = [10 + i % 80 for i in range(50)]
    driver = Driver(chunked_prefill_size=256, num_pages=200)
    driver.step(request(1, prompt=long, salt="a"), request(2, prompt=long, salt="b"))
    assert [r.rid for r in driver.plans[0].requests] == [1, 2], "other namespace"
    driver = Driver(SchedulerConfig(disable_radix_cache=True), chunked_prefill_size=256)
    driver.step(request(1, prompt=long, new=1), request(2, prompt=long, new=1))
    assert [r.rid for r in driver.plans[0].requests] == [1, 2], "nothing will be published"


def test_a_twin_that_is_aborted_holds_nobody_up() -> None:
    prompt = [10 + i % 80 for i in range(50)]
    driver = Driver(num_pages=200)
    driver.step(request(1, prompt=prompt), request(2, prompt=prompt))
    driver.abort(1)
    assert [r.rid for r in driver.plans[1].requests] == [2]
    driver.run()
    assert driver.finished[2].reason == "length"


def test_what_finished_requests_wrote_decides_how_many_are_let_in() -> None:
    """Retraction is rare in steady state: the estimate learns what share is written."""
    lengths = {rid: 4 + rid * 7 % 20 for rid in range(400)}

    def token(plan: Plan, index: int) -> int:
        owner = plan.requests[index]
        return 2 if len(owner.output_ids) + 1 >= lengths[owner.rid] else 7

    driver = Driver(
        SchedulerConfig(max_queue=500),
        token=token,
        num_pages=60,
        max_running_requests=32,
        chunked_prefill_size=64,
    )
    driver.run(*[request(rid, prompt=10, new=54) for rid in lengths], limit=20_000)
    assert driver.scheduler.queues.estimate.ratio < 0.45  # 13.5 of 54 tokens, and a margin
    assert driver.scheduler.queues.retractions < 0.1 * len(lengths)
    assert all(driver.finished[rid].completion_tokens == n for rid, n in lengths.items())


def test_requests_that_wait_for_nothing_end_the_engine_instead_of_spinning() -> None:
    driver = Driver()
    driver.scheduler.queues.kv.pool.allocate = lambda count: None  # type: ignore[method-assign]
    with pytest.raises(EngineFault, match="1 requests wait, and nothing can run"):
        driver.run(request(1))
