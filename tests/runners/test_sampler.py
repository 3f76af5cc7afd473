"""The same request gets the same token: in a graph or eagerly, alone or in any company, with or
without a step between sampling and reading."""

from __future__ import annotations

import pytest
import torch

from duograph.runners.batch import (
    ForwardBatch,
    ForwardMode,
    ForwardOutput,
    RowInit,
    SamplingBatch,
)
from duograph.runners.buffers import GraphInputBuffers
from duograph.runners.config import GraphConfig
from duograph.runners.recorded_graph import RecordedGraphBackend
from duograph.runners.request_table import RequestTable
from duograph.runners.sampler import SampledStep, Sampler
from duograph.runners.sampling_params import SamplingParams
from duograph.runners.step_inputs import StepInputs
from duograph.runners.worker import ModelWorker
from duograph.tests.worker_driver import PARAMS, VOCAB, WorkerDriver, generate, make_worker


class Bench:
    """A sampler over fixed logits, one row per entry of PARAMS."""

    def __init__(self, params: dict[int, SamplingParams] = PARAMS) -> None:
        self.table = RequestTable(
            max_running_requests=8, max_pages=4, vocab_size=VOCAB, device=torch.device("cpu")
        )
        self.sampler = Sampler(self.table)
        self.params = params
        self.logits = torch.randn(9, VOCAB, generator=torch.Generator().manual_seed(0)) * 3
        batch = self.batch(sorted(params), init=True)
        buffers = GraphInputBuffers(max_bs=8, max_tokens=1, page_size=4, device=self.table.device)
        buffers.load_decode(batch.inputs, len(params), self.table.tables)
        self.table.init_counts(batch.row_inits)

    def batch(
        self, rows: list[int], *, init: bool = False, sampling: SamplingBatch | None = None
    ) -> ForwardBatch:
        size = len(rows)
        return ForwardBatch(
            step_id=1,
            mode=ForwardMode.DECODE,
            inputs=StepInputs.decode(
                rows,
                [10 + row for row in rows],
                [0] * size,
                row_inits=[(row, self.params[row]) for row in rows if init],
            ),
            extend_lens=[1] * size,
            row_inits=[RowInit(row, self.params[row], [1, 2, 3], [4]) for row in rows if init],
            sampling=sampling or SamplingBatch(),
        )

    def finish(
        self,
        rows: list[int],
        sampling: SamplingBatch | None = None,
        tokens: torch.Tensor | None = None,
    ) -> SampledStep:
        batch = self.batch(rows, sampling=sampling)
        places = batch.inputs.rows
        output = ForwardOutput(self.logits[places], tokens, places, batch.inputs.seq_lens.int())
        return self.sampler.finish(batch, output)

    def tokens(self, rows: list[int], sampling: SamplingBatch | None = None) -> dict[int, int]:
        return dict(zip(rows, self.finish(rows, sampling).to_result().tokens, strict=True))


def test_company_does_not_change_a_token() -> None:
    bench = Bench()
    everyone = bench.tokens([6, 2, 5, 1, 3, 4], SamplingBatch(filtered=True))
    for row in PARAMS:
        filtered = SamplingBatch(filtered=PARAMS[row].needs_filter)
        assert bench.tokens([row], filtered) == {row: everyone[row]}


def test_a_plain_row_gets_the_same_token_with_and_without_the_filters() -> None:
    bench = Bench()
    rows = [1, 2, 3]
    assert bench.tokens(rows) == bench.tokens(rows, SamplingBatch(filtered=True))


def test_a_recorded_sampler_gives_the_tokens_of_an_eager_one() -> None:
    bench = Bench()
    rows = torch.tensor([1, 2, 3, 0])
    lens = torch.tensor([1, 1, 1, 1], dtype=torch.int32)
    logits = torch.zeros(4, VOCAB)
    graph, (tokens,) = RecordedGraphBackend().capture(
        lambda: (bench.sampler.sample_plain(logits, rows, lens),)
    )
    lens.copy_(torch.tensor([11, 12, 13, 1]))
    logits.copy_(bench.logits[rows])
    graph.replay()
    assert dict(zip([1, 2, 3], tokens.tolist()[:3], strict=True)) == bench.tokens([1, 2, 3])


def test_the_position_and_the_seed_matter() -> None:
    bench = Bench()
    row = torch.tensor([2])

    def draw(seed: int, length: int) -> int:
        bench.table.seed[2] = seed
        flat = torch.zeros(1, VOCAB)
        lens = torch.tensor([length], dtype=torch.int32)
        return int(bench.sampler.sample_plain(flat, row, lens))

    assert len({draw(1, length) for length in range(30)}) > 10
    assert len({draw(seed, 5) for seed in range(30)}) > 10
    assert draw(3, 7) == draw(3, 7)


def test_the_token_is_left_for_the_next_step() -> None:
    bench = Bench()
    tokens = bench.tokens([4, 1, 2], SamplingBatch(filtered=True))
    assert {row: int(bench.table.next_tokens[row]) for row in tokens} == tokens


def test_tokens_of_a_graph_are_taken_over_as_they_are() -> None:
    bench = Bench()
    from_graph = torch.tensor([5, 6])
    step = bench.finish([1, 2], tokens=from_graph)
    assert step.tokens is from_graph  # the graph has stored them itself
    assert bench.table.next_tokens[1] == 0


def test_bias_steers_and_bans() -> None:
    bench = Bench()
    favourite = bench.tokens([1])[1]
    banned = SamplingBatch(bias={0: {favourite: float("-inf")}})
    assert bench.tokens([1], banned)[1] != favourite
    forced = SamplingBatch(bias={1: {42: 100.0}})
    assert bench.tokens([2, 1], forced)[1] == 42


def test_logprobs_are_those_of_the_raw_logits_in_the_order_asked_for() -> None:
    bench = Bench()
    sampling = SamplingBatch(bias={0: {42: 100.0}}, logprobs={2: 3, 0: 0})
    result = bench.finish([1, 3, 2], sampling).to_result()
    assert set(result.logprobs) == {0, 2}
    raw = bench.logits[[1, 2]].log_softmax(-1)
    assert result.tokens[0] == 42
    assert result.logprobs[0].logprob == pytest.approx(float(raw[0, 42]), abs=1e-6)
    assert result.logprobs[0].top_ids == []
    best = raw[1].topk(3)
    assert result.logprobs[2].top_ids == best.indices.tolist()
    assert result.logprobs[2].top_logprobs == pytest.approx(best.values.tolist(), abs=1e-6)
    assert result.logprobs[2].logprob == pytest.approx(float(raw[1, result.tokens[2]]), abs=1e-6)


def test_only_listed_rows_are_counted_as_generated() -> None:
    bench = Bench({1: SamplingParams(presence_penalty=1.0), 2: SamplingParams(frequency_penalty=1)})
    result = bench.finish([2, 1], SamplingBatch(penalized=[1])).to_result()
    counts = bench.table.output_counts
    assert counts[1, 4] == 1 + (result.tokens[1] == 4)  # from output_ids
    assert counts[1].sum() == 2 and counts[2].sum() == 1
    assert bench.table.prompt_mask[1].nonzero().flatten().tolist() == [1, 2, 3]


GRAPHS = {
    "graph": GraphConfig(),
    "eager": GraphConfig(disable_cuda_graph=True, disable_piecewise_cuda_graph=True),
}


@pytest.fixture(scope="module", params=GRAPHS)
def worker(request: pytest.FixtureRequest) -> ModelWorker:
    return make_worker(graph=GRAPHS[request.param])


# From the graph worker, compared with what each other way of running gives.
EXPECTED: dict[int, list[int]] = {}


@pytest.mark.slow
def test_a_request_gets_its_tokens_alone_in_company_overlapped_graph_or_eager(
    worker: ModelWorker,
) -> None:
    together = generate(worker, [1, 2, 3, 4, 5, 6], 8)
    overlapped = generate(worker, [6, 5, 4, 3, 2, 1], 8, overlap=True)
    assert overlapped == together
    for row in PARAMS:
        assert generate(worker, [row], 8) == {row: together[row]}
    if not EXPECTED:
        EXPECTED.update(together)
    assert together == EXPECTED
    assert len({tuple(tokens) for tokens in together.values()}) == len(PARAMS)


def test_penalties_count_tokens_that_the_host_has_not_seen(worker: ModelWorker) -> None:
    params = {
        1: SamplingParams(temperature=0.0, frequency_penalty=1.5, presence_penalty=0.5),
        2: SamplingParams(temperature=0.0),
        3: SamplingParams(temperature=0.8, seed=3, repetition_penalty=1.5),
    }

    def run(overlap: bool, penalized: list[int]) -> list[list[int]]:
        driver = WorkerDriver(worker)
        prompts = {row: driver.prompt(6, seed=row) for row in params}
        sampling = SamplingBatch(penalized=penalized)
        outputs = [worker.launch(driver.extend(prompts, params=params, sampling=sampling))]
        for _ in range(20):
            if not overlap:
                outputs[-1].wait()
            outputs.append(worker.launch(driver.decode([1, 2, 3], sampling)))
        return [list(column) for column in zip(*(o.wait().tokens for o in outputs), strict=True)]

    waiting, overlapped, plain = run(False, [0, 2]), run(True, [0, 2]), run(False, [])
    assert overlapped == waiting
    assert waiting[1] == plain[1]
    assert waiting[0] != plain[0] and waiting[2] != plain[2]
    # 1.5 a repetition soon outweighs any lead a token of this model has
    assert max(waiting[0].count(token) for token in waiting[0]) < max(
        plain[0].count(token) for token in plain[0]
    )
