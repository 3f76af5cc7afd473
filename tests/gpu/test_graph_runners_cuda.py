"""Both graph runners on CUDA graphs: the checks of tests/runners/test_graph_runners.py, and what
only a device can show. Triton attention, so nothing has to be installed beside torch."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch

from duograph.runners.config import GraphConfig
from duograph.runners.forward_context import use_context
from duograph.runners.graph import CaptureError, CudaGraphBackend
from duograph.runners.piecewise import TorchCompileCutter
from duograph.runners.worker import ModelWorker
from duograph.tests.graph_checks import (
    FILLS,
    decode_runner,
    on_stream,
    prefill_runner,
    replay_and_eager,
    restore,
    results_with_dummy_slot,
    runners_of,
    same,
    snapshot,
)
from duograph.tests.worker_driver import PARAMS, WorkerDriver, generate, make_worker

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SHAPE: dict[str, object] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_heads": 6,
    "num_kv_heads": 2,
    "head_dim": 64,
    "context_length": 512,
}
DECODE = GraphConfig(disable_piecewise_cuda_graph=True)
PREFILL = GraphConfig(disable_cuda_graph=True)
NONE = GraphConfig(disable_cuda_graph=True, disable_piecewise_cuda_graph=True)


def cuda_worker(
    graph: GraphConfig, dtype: torch.dtype = torch.bfloat16, **options: object
) -> ModelWorker:
    settings: dict[str, object] = {
        "max_running_requests": 20,
        "chunked_prefill_size": 256,
        "max_total_tokens": 4096,
        "page_size": 16,
    }
    return make_worker(
        device="cuda",
        dtype=dtype,
        graph=graph,
        model_changes=SHAPE,
        **(settings | options),  # type: ignore[arg-type]
    )


@pytest.fixture(scope="module")
def worker() -> ModelWorker:
    return cuda_worker(GraphConfig(piecewise_cuda_graph_compiler="eager"))


# captured: 1 2 4 8 12 16 20
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 8, 9, 12, 13, 16, 17, 20])
def test_a_decode_replay_is_bit_equal_to_eager_at_the_same_padded_size(
    worker: ModelWorker, size: int
) -> None:
    driver = WorkerDriver(worker)
    driver.start({row: 3 + 5 * row for row in range(1, size + 1)})
    for _ in range(2):
        replayed, eager = replay_and_eager(worker, driver.decode(list(range(size, 0, -1))))
        assert same(replayed, eager)


@pytest.mark.parametrize("tokens", [1, 3, 4, 5, 63, 64, 65, 80, 81, 240, 255, 256])
def test_pieces_are_bit_equal_to_eager_at_the_same_padded_size(
    worker: ModelWorker, tokens: int
) -> None:
    driver = WorkerDriver(worker)
    driver.start({1: 21})
    second = tokens // 3
    chunks = {1: driver.prompt(tokens - second, seed=7)}
    if second:
        chunks[2] = driver.prompt(second, seed=8)
    replayed, eager = replay_and_eager(worker, driver.extend(chunks))
    assert same(replayed, eager)


def test_a_second_replay_gives_the_same_bits(worker: ModelWorker) -> None:
    driver = WorkerDriver(worker)
    driver.start({row: 6 * row for row in range(1, 6)})
    for batch in (driver.decode([1, 2, 3, 4, 5]), driver.extend({6: driver.prompt(70)})):
        first, _ = results_with_dummy_slot(worker, batch, FILLS["zeros"])
        second, _ = results_with_dummy_slot(worker, batch, FILLS["zeros"])
        assert same(first, second)


def test_real_rows_do_not_depend_on_what_the_padding_holds(worker: ModelWorker) -> None:
    driver = WorkerDriver(worker)
    driver.start({row: 6 * row for row in range(1, 6)})
    decode = driver.decode([1, 2, 3, 4, 5])  # three padding rows
    extend = driver.extend({6: driver.prompt(71), 1: driver.prompt(8)})  # one padding token
    wide = driver.extend({7: driver.prompt(129)})  # fifteen
    for batch, written in ((decode, 5), (extend, 79), (wide, 129)):
        runs = [results_with_dummy_slot(worker, batch, fill) for fill in FILLS.values()]
        for results, changed in runs:
            assert not results[0].isnan().any()
            assert same(results, runs[0][0])
            assert changed == written


def test_steps_above_the_largest_size_go_eager(worker: ModelWorker) -> None:
    small = cuda_worker(GraphConfig(cuda_graph_max_bs=2, piecewise_cuda_graph_max_tokens=16))
    driver = WorkerDriver(small)
    driver.start({1: 16, 2: 17, 3: 40})
    small.launch(driver.decode([1, 2, 3])).wait()
    stats = small.graph_stats()
    assert stats["eager_steps"] == {"decode": {"too_large": 1}, "prefill": {"too_large": 2}}


@pytest.mark.parametrize("graph", [GraphConfig(), NONE], ids=["graph", "eager"])
def test_a_request_gets_its_tokens_alone_in_company_and_overlapped(graph: GraphConfig) -> None:
    """In float32, where another batch size shifts no token."""
    running = cuda_worker(graph, torch.float32)
    together = generate(running, [1, 2, 3, 4, 5, 6], 8)
    assert generate(running, [6, 5, 4, 3, 2, 1], 8, overlap=True) == together
    for row in PARAMS:
        assert generate(running, [row], 8) == {row: together[row]}
    assert generate(cuda_worker(DECODE, torch.float32), [1, 2, 3, 4, 5, 6], 8) == together
    assert running.graph_stats()["recompiles"] == 0


def test_overlapped_steps_do_not_overtake_each_other(worker: ModelWorker) -> None:
    driver = WorkerDriver(worker)
    driver.start(dict.fromkeys(range(1, 21), 10))
    expected = generate(worker, list(range(1, 7)), 40)
    for _ in range(5):
        assert generate(worker, list(range(1, 7)), 40, overlap=True) == expected


def test_a_one_row_decode_step_is_close_to_the_plain_forward(worker: ModelWorker) -> None:
    driver = WorkerDriver(worker)
    driver.start({1: 150})
    runner, parts = decode_runner(worker), runners_of(worker).parts
    batch = driver.decode([1])
    assert parts.model.decode_forward(1) != parts.model.model
    with torch.no_grad(), on_stream(worker):
        parts.table.apply(batch)
        before = snapshot(parts)
        parts.buffers.load_decode(batch, 1)
        results = []
        for forward in (parts.model.decode_forward(1), parts.model.model):
            with use_context(runner.context(1)):
                results.append(runner.step(1, forward)[0].clone())
            restore(parts, before)
    torch.testing.assert_close(*results, atol=0.06, rtol=0.05)


def test_inductor_pieces_are_close_to_eager_and_repeatable() -> None:
    compiled = cuda_worker(
        GraphConfig(piecewise_cuda_graph_compiler="inductor", disable_cuda_graph=True)
    )
    driver = WorkerDriver(compiled)
    for row, tokens in ((1, 5), (2, 64), (3, 200), (4, 256)):
        batch = driver.extend({row: driver.prompt(tokens)})
        replayed, eager = replay_and_eager(compiled, batch)
        torch.testing.assert_close(replayed[0], eager[0], atol=0.06, rtol=0.05)
        again, _ = replay_and_eager(compiled, batch)
        assert torch.equal(again[0], replayed[0])
    assert compiled.graph_stats()["prefill"]["cutter"] == "torch.compile/inductor"


def test_compiled_decode_is_close_to_eager() -> None:
    compiled = cuda_worker(
        GraphConfig(
            enable_torch_compile=True,
            torch_compile_max_bs=4,
            cuda_graph_bs=(2, 4, 8),
            disable_piecewise_cuda_graph=True,
        )
    )
    driver = WorkerDriver(compiled)
    driver.start({row: 10 * row for row in range(1, 9)})
    for rows in ([1], [1, 2, 3, 4], list(range(1, 9))):
        replayed, eager = replay_and_eager(compiled, driver.decode(rows))
        torch.testing.assert_close(replayed[0], eager[0], atol=0.06, rtol=0.05)


def test_a_trace_after_start_up_raises_and_is_counted() -> None:
    fresh = cuda_worker(GraphConfig(disable_cuda_graph=True, piecewise_cuda_graph_tokens=(16,)))
    cutter = prefill_runner(fresh).cutter
    assert isinstance(cutter, TorchCompileCutter) and cutter.traced is not None
    ids = torch.zeros(8, dtype=torch.int32, device="cuda")
    with torch.no_grad(), pytest.raises(Exception, match="traced again after start-up"):
        cutter.traced(ids, ids.long())
    assert fresh.graph_stats()["recompiles"] == 1


class Unsafe(torch.nn.Module):
    def __init__(self, inner: torch.nn.Module, look: Callable[[torch.Tensor], object]) -> None:
        super().__init__()
        self.inner = inner
        self.look = look

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.inner(input_ids, positions)
        self.look(hidden)
        return hidden


@pytest.mark.parametrize(
    "look",
    [lambda h: h.max().item(), lambda h: h[h > 1e9], lambda h: h.cpu()],
    ids=["item", "mask", "cpu"],
)
def test_an_unsafe_model_fails_at_capture(look: Callable[[torch.Tensor], object]) -> None:
    unsafe = make_worker(
        device="cuda", dtype=torch.bfloat16, graph=DECODE, capture=False, model_changes=SHAPE
    )
    model = unsafe._model
    model.model = Unsafe(model.model, look)  # type: ignore[assignment]
    with pytest.raises(CaptureError, match="cannot be captured") as error:
        unsafe.capture(lambda phase, done, total: None)
    assert any("--disable-cuda-graph" in note for note in error.value.__notes__)


@pytest.fixture
def backend() -> Iterator[CudaGraphBackend]:
    yield CudaGraphBackend(torch.cuda.Stream())
    torch.cuda.synchronize()


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32, torch.int64, torch.bool, torch.uint8]
)
def test_an_alias_is_the_same_memory_in_every_dtype_and_layout(
    backend: CudaGraphBackend, dtype: torch.dtype
) -> None:
    tensor = torch.arange(24, device="cuda").view(4, 6).to(dtype)
    for view in (tensor, tensor.t(), tensor[1:, ::2], tensor[2, 3]):
        alias = backend.alias(view)
        assert alias.data_ptr() == view.data_ptr() and alias.dtype == dtype
        assert alias.shape == view.shape and torch.equal(alias, view)
    assert backend.alias(tensor[:0]).shape == (0, 6)


def three_ops(x: torch.Tensor) -> tuple[torch.Tensor]:
    return ((x * 2 + 1) * 3,)


def test_graphs_of_dropped_results_share_memory(backend: CudaGraphBackend) -> None:
    source = torch.ones(1 << 20, device="cuda")
    graphs = []
    for index in range(8):
        size = source.numel() >> index
        graph, (result,) = backend.capture(partial(three_ops, source[:size]), warmups=1)
        graphs.append((graph, backend.alias(result)))
        del result
        gc.collect()
    # eight results and temporaries of 4 MiB and less; alone the largest takes 8
    assert backend.pool_bytes() < 40 << 20
    source.fill_(2.0)
    torch.cuda.synchronize()
    for graph, alias in graphs:
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(alias, torch.full_like(alias, 15.0))


def test_memory_is_measured_before_the_pool_is_sized() -> None:
    planned = cuda_worker(
        GraphConfig(), max_total_tokens=None, mem_fraction_static=None, chunked_prefill_size=128
    )
    limits = planned.limits
    # all requests at full context: more would never be used
    assert limits.max_total_num_tokens == 20 * 512
    driver = WorkerDriver(planned)
    driver.start({1: 40})
    assert planned.launch(driver.decode([1])).wait().tokens
    assert planned.graph_stats()["pool_bytes"] > 0


def test_smaller_graphs_live_in_the_memory_of_the_largest() -> None:
    """A vocabulary so large that logits are most of what a graph needs."""
    wide = make_worker(
        device="cuda",
        dtype=torch.bfloat16,
        graph=GraphConfig(cuda_graph_bs=(20, 16, 12, 8), disable_piecewise_cuda_graph=True),
        model_changes=SHAPE | {"vocab_size": 200_000},
        max_running_requests=20,
    )
    sizes = decode_runner(wide).stats()
    largest = sizes[20].nbytes
    assert largest >= 20 * 200_000 * 4
    assert sum(stats.nbytes for size, stats in sizes.items() if size != 20) < largest / 2


FAULT = """
import torch
from duograph.runners.config import GraphConfig
from duograph.tests.worker_driver import WorkerDriver, make_worker
worker = make_worker(device="cuda", graph=GraphConfig(disable_piecewise_cuda_graph=True))
driver = WorkerDriver(worker)
driver.start({1: 5})
torch.cuda.synchronize()
worker._table.next_tokens.fill_(10**9)  # no such token: the embedding's device assert
torch.cuda.synchronize()
output = worker.launch(driver.decode([1]))
try:
    output.wait()
except Exception as error:
    print("RAISED", type(error).__name__, error)
"""


def test_a_device_error_comes_out_of_wait() -> None:
    """In a process of its own, as the error poisons the CUDA context."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", FAULT],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env=environment,
    )
    assert "RAISED" in done.stdout, done.stderr[-2000:]


def test_direct_calls_are_ordered_with_launches(worker: ModelWorker) -> None:
    driver = WorkerDriver(worker)
    output = worker.launch(driver.extend({1: driver.prompt(30)}))
    with on_stream(worker):
        token = runners_of(worker).parts.table.next_tokens[1].clone()
    assert output.wait().tokens == [int(token)]
