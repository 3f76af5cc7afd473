"""Both graph runners on the CPU, over recorded graphs: bisect, pad, copy, replay, slice, fall
back, against the same work done eagerly."""

from __future__ import annotations

import logging

import pytest
import torch

from duograph.runners.batch import ForwardMode, PromptWish, SamplingBatch
from duograph.runners.config import GraphConfig
from duograph.runners.piecewise import RecompileError, TorchCompileCutter
from duograph.runners.sampling_params import SamplingParams
from duograph.runners.worker import ModelWorker
from duograph.tests.graph_checks import (
    FILLS,
    decode_runner,
    prefill_runner,
    replay_and_eager,
    results_with_dummy_slot,
    runners_of,
    same,
)
from duograph.tests.worker_driver import WorkerDriver, make_worker

# every bucket, one less and one more
DECODE_SIZES = [1, 2, 3, 4, 5, 7, 8]
PREFILL_TOKENS = [1, 4, 5, 15, 16, 17, 63, 64]


@pytest.fixture(scope="module")
def worker() -> ModelWorker:
    return make_worker()


@pytest.mark.parametrize("size", DECODE_SIZES)
def test_a_decode_replay_is_bit_equal_to_eager_at_the_same_padded_size(
    worker: ModelWorker, size: int
) -> None:
    driver = WorkerDriver(worker)
    driver.start({row: 3 + 5 * row for row in range(1, size + 1)})
    for _ in range(2):  # the second step reads what the first has left on the device
        replayed, eager = replay_and_eager(worker, driver.decode(list(range(size, 0, -1))))
        assert same(replayed, eager)


@pytest.mark.parametrize("tokens", PREFILL_TOKENS)
def test_pieces_are_bit_equal_to_eager_at_the_same_padded_size(
    worker: ModelWorker, tokens: int
) -> None:
    driver = WorkerDriver(worker)
    driver.start({1: 21})
    second = tokens // 3  # a sequence with a prefix and, if there is room, one without
    chunks = {1: driver.prompt(tokens - second, seed=7)}
    if second:
        chunks[2] = driver.prompt(second, seed=8)
    replayed, eager = replay_and_eager(worker, driver.extend(chunks))
    assert same(replayed, eager)


def test_decode_logits_are_those_of_an_unpadded_eager_step(worker: ModelWorker) -> None:
    driver = WorkerDriver(worker)
    driver.start({1: 9, 2: 30, 3: 17})
    batch = driver.decode([1, 2, 3])  # runs padded to 4
    runners = runners_of(worker)
    with torch.no_grad():
        eager = runners.eager.run(batch).logits
        torch.testing.assert_close(
            decode_runner(worker).run(batch).logits, eager, atol=1e-5, rtol=1e-5
        )


def test_real_rows_do_not_depend_on_what_the_padding_holds(worker: ModelWorker) -> None:
    driver = WorkerDriver(worker)
    driver.start({row: 6 * row for row in range(1, 6)})
    decode = driver.decode([1, 2, 3, 4, 5])  # three padding rows
    extend = driver.extend({6: driver.prompt(11), 1: driver.prompt(8)})  # 45 padding tokens
    for batch, written in ((decode, 5), (extend, 19)):
        runs = [results_with_dummy_slot(worker, batch, fill) for fill in FILLS.values()]
        for results, changed in runs:
            assert not any(tensor.isnan().any() for tensor in results[:1])
            assert same(results, runs[0][0])
            assert changed == written  # exactly the slots of the real tokens


def test_rows_left_by_a_larger_batch_do_not_reach_a_smaller_one(worker: ModelWorker) -> None:
    driver = WorkerDriver(worker)
    driver.start({row: 4 * row for row in range(1, 9)})
    worker.launch(driver.decode(list(range(1, 9)))).wait()
    batch = driver.decode([2, 7, 5])
    _, changed = results_with_dummy_slot(worker, batch, FILLS["zeros"])
    assert changed == 3
    buffers = runners_of(worker).parts.buffers
    assert buffers.req_pool_indices[:4].tolist() == [2, 7, 5, 0]  # the graph of 4
    assert buffers.seq_lens[3] == 1


@pytest.mark.slow
def test_a_step_above_the_largest_size_goes_eager_counted_and_warned_of_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    graph = GraphConfig(cuda_graph_max_bs=2, piecewise_cuda_graph_max_tokens=16)
    small = make_worker(graph=graph)
    driver = WorkerDriver(small)
    with caplog.at_level(logging.WARNING):
        driver.start({1: 16, 2: 17, 3: 40})
        for rows in ([1, 2], [1, 2, 3], [1, 2, 3]):
            small.launch(driver.decode(rows)).wait()
    stats = small.graph_stats()
    assert stats["eager_steps"] == {"decode": {"too_large": 2}, "prefill": {"too_large": 2}}
    assert stats["decode"]["sizes"]["2"]["replays"] == 1
    assert stats["prefill"]["sizes"]["16"] | {"seconds": 0, "nbytes": 0} == {
        "seconds": 0, "nbytes": 0, "replays": 1, "real": 16, "padded": 0,
    }  # fmt: skip
    warnings = [r.getMessage() for r in caplog.records if r.name.startswith("duograph")]
    warnings = [text for text in warnings if "without a graph" in text]
    assert len(warnings) == 2
    assert any("--cuda-graph-max-bs" in text for text in warnings)
    assert any("--piecewise-cuda-graph-max-tokens" in text for text in warnings)


def test_the_eager_forward_takes_more_than_the_worker_s_limits_allow() -> None:
    graph = GraphConfig(disable_cuda_graph=True, disable_piecewise_cuda_graph=True)
    tight, roomy = make_worker(graph=graph, chunked_prefill_size=16), make_worker(graph=graph)
    tokens = []
    for worker in (tight, roomy):
        driver = WorkerDriver(worker)
        prompt = worker.launch(driver.extend({1: driver.prompt(40), 2: driver.prompt(3)}))
        rows = worker.launch(driver.decode([1, 2]))
        tokens.append((prompt.wait().tokens, rows.wait().tokens))
    assert runners_of(tight).parts.buffers.max_tokens == 16
    assert tokens[0] == tokens[1]


def test_a_disabled_phase_runs_eagerly_and_is_counted() -> None:
    graph = GraphConfig(disable_cuda_graph=True, disable_piecewise_cuda_graph=True)
    plain = make_worker(graph=graph)
    driver = WorkerDriver(plain)
    driver.start({1: 5})
    plain.launch(driver.decode([1])).wait()
    stats = plain.graph_stats()
    assert stats["eager_steps"] == {"decode": {"disabled": 1}, "prefill": {"disabled": 1}}
    assert not stats["decode"]["enabled"] and not stats["prefill"]["enabled"]


@pytest.mark.slow
def test_without_padding_every_size_has_its_own_graph() -> None:
    graph = GraphConfig(disable_cuda_graph_padding=True, disable_piecewise_cuda_graph=True)
    exact = make_worker(graph=graph, max_running_requests=5)
    driver = WorkerDriver(exact)
    driver.start({1: 5, 2: 6, 3: 7})
    exact.launch(driver.decode([1, 2, 3])).wait()
    sizes = exact.graph_stats()["decode"]["sizes"]
    assert list(sizes) == ["1", "2", "3", "4", "5"]
    assert sizes["3"]["replays"] == 1 and sizes["3"]["padded"] == 0


def test_exact_sizes_refuse_what_was_not_captured() -> None:
    graph = GraphConfig(
        disable_cuda_graph_padding=True, cuda_graph_bs=(4,), disable_piecewise_cuda_graph=True
    )
    exact = make_worker(graph=graph)
    driver = WorkerDriver(exact)
    driver.start({1: 5, 2: 6, 3: 7})
    exact.launch(driver.decode([1, 2, 3])).wait()
    assert exact.graph_stats()["eager_steps"]["decode"] == {"not_captured": 1}


def test_padded_rows_are_counted(worker: ModelWorker) -> None:
    driver = WorkerDriver(worker)
    driver.start({1: 5, 2: 6, 3: 7})
    before = worker.graph_stats()["decode"]["sizes"]["4"]
    worker.launch(driver.decode([1, 2, 3])).wait()
    after = worker.graph_stats()["decode"]["sizes"]["4"]
    assert after["replays"] - before["replays"] == 1
    assert after["real"] - before["real"] == 3
    assert after["padded"] - before["padded"] == 1


def test_the_first_token_is_sampled_as_its_own_request_asks(worker: ModelWorker) -> None:
    """The parameters of a new row reach the device while its pieces run."""
    runners = runners_of(worker)
    tokens = []
    for runner in (prefill_runner(worker), runners.eager):
        driver = WorkerDriver(worker)
        for row in (1, 2):  # what the rows of the requests before have left
            batch = driver.extend({row: driver.prompt(5)}, params={row: SamplingParams(seed=row)})
            worker.launch(batch).wait()
        driver = WorkerDriver(worker)
        params = {1: SamplingParams(temperature=0.0), 2: SamplingParams(temperature=3.0, seed=11)}
        prompts = {row: driver.prompt(9, seed=row) for row in (1, 2)}
        batch = driver.extend(prompts, params=params)
        with torch.no_grad():
            step = worker._sampler.finish(batch, runner.run(batch))
        tokens.append(step.tokens.tolist())
    assert tokens[0] == tokens[1]


def test_a_prompt_whose_logprobs_are_wanted_runs_eagerly(worker: ModelWorker) -> None:
    """A graph leaves one row of each sequence, and here every row counts."""
    driver = WorkerDriver(worker)
    before = worker.graph_stats()
    prompt = driver.prompt(9)
    wish = SamplingBatch(prompt_logprobs={0: PromptWish(0, prompt[1:], 3)})
    result = worker.launch(driver.extend({1: prompt}, sampling=wish)).wait()
    after = worker.graph_stats()
    assert len(result.prompt_logprobs[0]) == 8
    reasons = after["eager_steps"]["prefill"]
    was = before["eager_steps"]["prefill"].get("prompt_logprobs", 0)
    assert reasons["prompt_logprobs"] == was + 1
    assert after["prefill"]["sizes"] == before["prefill"]["sizes"]
    assert after["recompiles"] == 0


def test_no_mix_of_steps_traces_the_model_again(worker: ModelWorker) -> None:
    driver = WorkerDriver(worker)
    for row, length in enumerate((1, 2, 16, 33, 64), start=1):
        worker.launch(driver.extend({row: driver.prompt(length)})).wait()
    worker.launch(driver.extend({1: [3], 2: [4, 5], 3: [6] * 30})).wait()
    worker.launch(driver.decode([1, 2, 3, 4, 5])).wait()
    assert worker.graph_stats()["recompiles"] == 0


@pytest.mark.slow
def test_a_trace_after_start_up_raises_and_is_counted() -> None:
    fresh = make_worker(graph=GraphConfig(disable_cuda_graph=True))
    runner = prefill_runner(fresh)
    assert isinstance(runner.cutter, TorchCompileCutter)
    assert runner.cutter.traced is not None
    with torch.no_grad(), pytest.raises(Exception, match="traced again after start-up") as error:
        other_type = torch.zeros(8, dtype=torch.int32)
        runner.cutter.traced(other_type, torch.zeros(8, dtype=torch.int64))
    chain = [error.value, error.value.__cause__, getattr(error.value, "inner_exception", None)]
    assert any(isinstance(link, RecompileError) for link in chain)
    assert fresh.graph_stats()["recompiles"] == 1


def test_replays_leave_logits_and_tokens_at_fixed_addresses(worker: ModelWorker) -> None:
    driver = WorkerDriver(worker)
    driver.start({1: 5, 2: 6})
    addresses = set()
    for _ in range(3):
        batch = driver.decode([1, 2])
        with torch.no_grad():
            output = decode_runner(worker).run(batch)
        assert output.tokens is not None
        addresses.add((output.logits.data_ptr(), output.tokens.data_ptr()))
    assert len(addresses) == 1


def test_a_malformed_extend_batch_is_refused_before_it_touches_the_pool(
    worker: ModelWorker,
) -> None:
    driver = WorkerDriver(worker)
    batch = driver.extend({1: driver.prompt(6)})
    batch.extend_lens = [5]
    assert batch.mode is ForwardMode.EXTEND
    with pytest.raises(ValueError, match="do not add up to 6 tokens"):
        worker.launch(batch).wait()
