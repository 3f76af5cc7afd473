"""Both graph runners on CUDA graphs: what only a device can show. That replays are exact is
test_every_captured_size.py's. Triton attention, so nothing has to be installed beside torch."""

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
from duograph.tests.gpu.cuda_workers import DECODE, NONE, SHAPE, cuda_worker
from duograph.tests.graph_checks import (
    decode_runner,
    on_stream,
    prefill_runner,
    replay_and_eager,
    restore,
    runners_of,
    snapshot,
)
from duograph.tests.worker_driver import PARAMS, WorkerDriver, generate, make_worker

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

WIDE_VOCABULARY = 400_000


@pytest.fixture(scope="module")
def worker() -> ModelWorker:
    return cuda_worker(GraphConfig(piecewise_cuda_graph_compiler="eager"))


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
        before = snapshot(parts)
        parts.load(batch, 1)
        results = []
        for forward in (parts.model.decode_forward(1), parts.model.model):
            with use_context(parts.decode_context(1)):
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


def segment_bytes(backend: CudaGraphBackend) -> int:
    """What the allocator has taken from the device for the pool of ``backend``."""
    segments = torch.cuda.memory_snapshot()
    return sum(s["total_size"] for s in segments if s["segment_pool_id"] == backend._pool)


def test_graphs_of_dropped_results_share_memory(backend: CudaGraphBackend) -> None:
    source = torch.ones(1 << 20, device="cuda")
    graphs = []
    for index in range(8):
        size = source.numel() - (index << 10)
        graph, (result,) = backend.capture(partial(three_ops, source[:size]), warmups=1)
        graphs.append((graph, backend.alias(result)))
        del result
        gc.collect()
    # Two tensors of 4 MiB at a time, in a segment of 20; eight results kept would take 32.
    assert segment_bytes(backend) <= 20 << 20
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


def reserved_for(sizes: tuple[int, ...]) -> int:
    """Bytes that torch takes from the device for a worker with decode graphs of ``sizes``, over a
    vocabulary so large that logits are most of what a graph needs."""
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    wide = make_worker(
        device="cuda",
        dtype=torch.bfloat16,
        graph=GraphConfig(cuda_graph_bs=sizes, disable_piecewise_cuda_graph=True),
        model_changes=SHAPE | {"vocab_size": WIDE_VOCABULARY},
        max_running_requests=20,
    )
    assert decode_runner(wide).sizes == tuple(sorted(sizes))
    return torch.cuda.memory_reserved() - before


def test_smaller_graphs_live_in_the_memory_of_the_largest() -> None:
    largest = reserved_for((20,))
    smaller_logits = (16 + 12 + 8) * WIDE_VOCABULARY * 2
    assert reserved_for((20, 16, 12, 8)) < largest + smaller_logits / 2


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
