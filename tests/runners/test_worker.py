"""The model worker: memory plan, start-up, launching behind the caller's back, failures."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from duograph.runners import memory_plan
from duograph.runners.batch import ForwardMode, SamplingBatch, dummy_batch
from duograph.runners.config import GraphConfig, RunnerConfig
from duograph.runners.graph import CaptureError
from duograph.runners.kv_pool import KVLayout
from duograph.runners.memory import GIB
from duograph.runners.memory_plan import MemoryPlanError, Needs, plan_pages
from duograph.runners.recorded_graph import RecordedGraphBackend
from duograph.runners.resolve import resolve_auto
from duograph.runners.worker import ModelWorker
from duograph.tests.graph_checks import decode_runner, runners_of
from duograph.tests.worker_driver import WorkerDriver, make_worker, tiny_config

# every test here starts a whole worker, both captures included
pytestmark = pytest.mark.slow

NO_PREFILL = GraphConfig(disable_piecewise_cuda_graph=True)
NO_GRAPHS = GraphConfig(disable_cuda_graph=True, disable_piecewise_cuda_graph=True)
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
LAYOUT = KVLayout(num_layers=2, num_kv_heads=2, head_dim=16, page_size=4, dtype=torch.float32)


def test_progress_goes_through_tracing_and_both_phases() -> None:
    worker = make_worker(capture=False)
    seen: list[tuple[str, int, int]] = []
    worker.capture(lambda phase, done, total: seen.append((phase, done, total)))
    assert seen == [
        ("compiling", 0, 1), ("compiling", 1, 1),
        ("capturing_prefill", 0, 2), ("capturing_prefill", 1, 2), ("capturing_prefill", 2, 2),
        *[("capturing_decode", done, 4) for done in range(5)],
    ]  # fmt: skip


def test_start_up_prints_the_lines_that_scripts_look_for(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="duograph"):
        make_worker(graph=NO_PREFILL)
    text = "\n".join(record.getMessage() for record in caplog.records)
    for line in (
        "KV Cache is allocated. #tokens: 1024, K size: 0.00 GB, V size: 0.00 GB",
        "Memory pool end. avail mem=",
        "Capture cuda graph begin. This can take up to several minutes. avail mem=",
        "Capture cuda graph bs [1, 2, 4, 8]",
        "Capturing batches (bs=8 avail_mem=",
        "Capture cuda graph end. Time elapsed: ",
    ):
        assert line in text


def test_graph_stats_can_be_sent_as_json() -> None:
    worker = make_worker(graph=NO_PREFILL)
    stats = json.loads(json.dumps(worker.graph_stats()))
    assert stats["backend"] == "recorded" and stats["pool_bytes"] > 0
    stages = stats["start_seconds"]
    assert list(stages) == [
        "attention_kernels",
        "tables",
        "measure_graphs",
        "kv_pool",
        "trace",
        "capture_prefill",
        "capture_decode",
    ]
    assert stages["capture_decode"] > 0 and stats["compiles"]["triton_compiled"] == 0


@pytest.fixture(scope="module")
def eager_worker() -> ModelWorker:
    return make_worker(graph=NO_GRAPHS)


def test_launch_returns_before_the_step_has_run(
    eager_worker: ModelWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()
    init_counts = eager_worker._table.init_counts

    def wait_first(*arguments: Any) -> None:
        assert gate.wait(10)
        init_counts(*arguments)

    monkeypatch.setattr(eager_worker._table, "init_counts", wait_first)
    driver = WorkerDriver(eager_worker)
    first = eager_worker.launch(driver.extend({1: [1, 2, 3]}))
    second = eager_worker.launch(driver.decode([1]))  # needs the token of the first
    gate.set()
    assert second.wait().step_id == first.wait().step_id + 1
    assert first.wait() is first.wait()


def test_what_the_forward_raises_comes_out_of_wait(
    eager_worker: ModelWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(runners_of(eager_worker).parts.model, "compute_logits", broken)
    driver = WorkerDriver(eager_worker)
    output = eager_worker.launch(driver.extend({1: [1, 2, 3]}))
    with pytest.raises(RuntimeError, match="illegal memory access"):
        output.wait()


def fail_captures(
    monkeypatch: pytest.MonkeyPatch, error: Callable[[], Exception], count: int
) -> None:
    """The first ``count`` captures raise."""
    remaining = iter(range(count))
    capture = RecordedGraphBackend.capture

    def maybe(self: RecordedGraphBackend, function: object, *, warmups: int = 0) -> object:
        if next(remaining, None) is not None:
            raise error()
        return capture(self, function, warmups=warmups)  # type: ignore[arg-type]

    monkeypatch.setattr(RecordedGraphBackend, "capture", maybe)


@pytest.mark.parametrize(
    "error",
    [
        lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        lambda: RuntimeError("CUDA error: out of memory"),  # from instantiating a graph
    ],
)
def test_without_memory_for_the_largest_graphs_the_others_are_used(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: Callable[[], Exception],
) -> None:
    fail_captures(monkeypatch, error, 2)
    with caplog.at_level(logging.WARNING, logger="duograph"):
        worker = make_worker(graph=NO_PREFILL)
    assert decode_runner(worker).sizes == (1, 2)
    assert worker.graph_stats()["decode"]["dropped"] == [8, 4]
    text = caplog.text
    assert "bs=8" in text and "--cuda-graph-max-bs" in text and "--mem-fraction-static" in text
    driver = WorkerDriver(worker)
    driver.start({1: 3, 2: 4, 3: 5})
    worker.launch(driver.decode([1, 2])).wait()
    worker.launch(driver.decode([1, 2, 3])).wait()
    stats = worker.graph_stats()
    assert stats["decode"]["sizes"]["2"]["replays"] == 1
    assert stats["eager_steps"]["decode"] == {"too_large": 1}


def test_without_memory_for_any_graph_decode_is_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    fail_captures(monkeypatch, lambda: torch.OutOfMemoryError("out of memory"), 99)
    worker = make_worker(graph=NO_PREFILL)
    driver = WorkerDriver(worker)
    driver.start({1: 3})
    worker.launch(driver.decode([1])).wait()
    assert worker.graph_stats()["eager_steps"]["decode"] == {"not_captured": 1}


def test_another_failure_of_a_capture_names_the_flag_to_go_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fail_captures(monkeypatch, lambda: RuntimeError("no such kernel"), 1)
    with pytest.raises(RuntimeError, match="no such kernel") as error:
        make_worker(graph=NO_PREFILL)
    assert any("--disable-cuda-graph" in note for note in error.value.__notes__)


class Unsafe(torch.nn.Module):
    """A forward that looks at its data on the host."""

    def __init__(
        self, inner: torch.nn.Module, look: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        super().__init__()
        self.inner = inner
        self.look = look

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.inner(input_ids, positions)
        return self.look(hidden)


@pytest.mark.parametrize(
    ("look", "op"),
    [
        (lambda hidden: hidden * hidden.max().item(), "Tensor.item"),
        (lambda hidden: hidden[hidden[:, 0] > -1e9], "aten.index.Tensor"),
    ],
)
def test_a_model_that_is_not_graph_safe_fails_at_capture_with_op_and_line(
    look: Callable[[torch.Tensor], torch.Tensor], op: str
) -> None:
    worker = make_worker(graph=NO_PREFILL, capture=False)
    model = worker._model
    model.model = Unsafe(model.model, look)  # type: ignore[assignment]
    with pytest.raises(CaptureError) as error:
        worker.capture(lambda phase, done, total: None)
    assert op in str(error.value) and f"{__file__}:" in str(error.value)
    assert any("--disable-cuda-graph" in note for note in error.value.__notes__)


def resolved(device: torch.device = CPU, **options: object) -> RunnerConfig:
    settings: dict[str, object] = {"page_size": 4, "max_running_requests": 8}
    config = RunnerConfig(**(settings | options))  # type: ignore[arg-type]
    return resolve_auto(config, tiny_config(), device)


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """Says how much memory there is: (free, total) bytes."""

    def set_memory(available: int, total: int) -> None:
        monkeypatch.setattr(memory_plan, "available_bytes", lambda device: available)
        monkeypatch.setattr(memory_plan, "total_bytes", lambda device: total)

    return set_memory


NOTHING = Needs(0, 0, 0)


def test_the_asked_for_number_of_tokens_wins(free: Callable[[int, int], None]) -> None:
    free(1 << 20, 2 << 20)
    assert plan_pages(resolved(max_total_tokens=1001), LAYOUT, CPU, NOTHING, 0) == 251 + 1


def test_no_more_pages_than_all_requests_can_use(free: Callable[[int, int], None]) -> None:
    free(100 * GIB, 100 * GIB)
    assert plan_pages(resolved(), LAYOUT, CPU, NOTHING, 0) == 8 * 128 // 4 + 1


def test_the_cpu_takes_a_quarter_of_what_is_free(free: Callable[[int, int], None]) -> None:
    free(100 * LAYOUT.bytes_per_page, GIB)
    assert plan_pages(resolved(), LAYOUT, CPU, NOTHING, 0) == 25 + 1


def test_measured_needs_and_a_reserve_are_left_free_on_cuda(
    free: Callable[[int, int], None],
) -> None:
    page = LAYOUT.bytes_per_page
    free(memory_plan.CUDA_RESERVE + 50 * page, 140 * GIB)
    config = resolved()
    assert plan_pages(config, LAYOUT, CUDA, Needs(10 * page, 20 * page, 5 * page), 0) == 15 + 1


def test_the_static_share_counts_what_is_used_already(free: Callable[[int, int], None]) -> None:
    page = LAYOUT.bytes_per_page
    free(60 * page, 100 * page)
    half = resolved(mem_fraction_static=0.5)
    assert plan_pages(half, LAYOUT, CUDA, NOTHING, 0) == 10 + 1
    assert plan_pages(half, LAYOUT, CPU, NOTHING, weights=30 * page) == 20 + 1


def test_no_room_for_one_page_is_an_error_with_numbers_and_flags(
    free: Callable[[int, int], None],
) -> None:
    free(LAYOUT.bytes_per_page, GIB)
    with pytest.raises(
        MemoryPlanError, match=r"out of memory: .* --mem-fraction-static \(now auto"
    ):
        plan_pages(resolved(), LAYOUT, CPU, NOTHING, 0)


def test_dummy_batches_touch_the_dummy_request_only(eager_worker: ModelWorker) -> None:
    parts = runners_of(eager_worker).parts
    for mode in ForwardMode:
        batch = dummy_batch(mode, 6)
        batch.sampling = SamplingBatch()
        before = [tensor[4:].clone() for tensor in parts.kv_pool.k]
        eager_worker.launch(batch).wait()
        after = [tensor[4:] for tensor in parts.kv_pool.k]
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_limits_leave_the_dummy_page_out(eager_worker: ModelWorker) -> None:
    limits = eager_worker.limits
    assert limits.num_pages == 257 and limits.max_total_num_tokens == 1024
    assert (limits.context_length, limits.chunked_prefill_size) == (128, 64)


def test_close_waits_for_what_was_launched() -> None:
    worker = make_worker(graph=NO_GRAPHS)
    driver = WorkerDriver(worker)
    output = worker.launch(driver.extend({1: [1, 2, 3]}))
    started = time.monotonic()
    worker.close()
    assert output.wait().step_id == 1 and time.monotonic() - started < 30
