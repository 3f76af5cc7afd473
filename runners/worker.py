"""The model worker: plan memory, build runners, capture, then run one batch after another.

It owns everything on the device. Which runner takes a step is decided in
``RunnerSet.pick_runner`` and nowhere else. This file knows no request, page policy or wire.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from duograph.runners.attention_choice import create_attention, warm_up_long_steps
from duograph.runners.batch import (
    ForwardBatch,
    ForwardMode,
    SamplingBatch,
    StepOutput,
    dummy_batch,
)
from duograph.runners.buffers import GraphInputBuffers
from duograph.runners.capture import Progress
from duograph.runners.config import RunnerConfig
from duograph.runners.graph import CudaGraphBackend, GraphBackend
from duograph.runners.graph_profile import GraphProfile
from duograph.runners.kv_pool import KVLayout, KVPool
from duograph.runners.memory import GIB, available_bytes
from duograph.runners.memory_plan import (
    Needs,
    measure_needs,
    plan_pages,
    release_cached,
)
from duograph.runners.model_config import ModelConfig
from duograph.runners.models.llama import CausalLM
from duograph.runners.parts import RunnerParts
from duograph.runners.piecewise import TorchCompileCutter
from duograph.runners.profiler import StepProfiler
from duograph.runners.recorded_graph import RecordedGraphBackend
from duograph.runners.request_table import RequestTable
from duograph.runners.resolve import resolve_auto
from duograph.runners.runner_set import Runner, RunnerSet
from duograph.runners.sampler import SampledStep, Sampler
from duograph.runners.stages import StageClock, TritonCompiles
from duograph.runners.streams import CpuStream, CudaStream, DeviceStream

logger = logging.getLogger(__name__)

_PAGES_TO_MEASURE_WITH = 2


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """What the scheduler has to respect."""

    num_pages: int  # including the dummy page 0
    page_size: int
    max_running_requests: int
    context_length: int
    chunked_prefill_size: int
    max_total_num_tokens: int


class ModelWorker:
    """Call ``plan_memory``, ``build_runners`` and ``capture`` once each, then ``launch``.

    Attributes:
        config: the resolved configuration.
    """

    def __init__(
        self,
        runner_config: RunnerConfig,
        model_config: ModelConfig,
        model: CausalLM,
        device: torch.device,
        stages: StageClock | None = None,
        progress: Progress = lambda phase, done, total: None,
    ) -> None:
        """``stages`` is told of every stage of the start, ``progress`` of the phase
        ``building_kernels``, if there are any to build.

        Raises:
            ConfigError: flags that cannot be honoured.
        """
        self._stages = stages or StageClock()
        self._compiles = TritonCompiles()
        if device.type == "cuda":
            self._compiles.install()
        self.config = resolve_auto(runner_config, model_config, device)
        self.device = device
        self._model = model
        self._weight_bytes = model.weight_bytes()
        self._layout = KVLayout(
            num_layers=model_config.num_layers,
            num_kv_heads=model_config.num_kv_heads,
            head_dim=model_config.head_dim,
            page_size=_known(self.config.page_size),
            dtype=model.activation_dtype,
        )
        self.config, self._attention = create_attention(
            self.config,
            runner_config,
            model_config,
            model.activation_dtype,
            device,
            progress,
        )
        self._stages.lap("attention_kernels")
        self._cos_sin = model.cos_sin(device)
        running = _known(self.config.max_running_requests)
        context = _known(self.config.context_length)
        self._table = RequestTable(
            max_running_requests=running,
            max_pages=-(-context // _known(self.config.page_size)),
            vocab_size=model_config.vocab_size,
            device=device,
        )
        warm_up_long_steps(
            self._attention,
            self._table.page_table,
            self._layout.page_size,
            model_config,
            model.activation_dtype,
        )
        self._buffers = GraphInputBuffers(
            max_bs=running,
            max_tokens=_known(self.config.chunked_prefill_size),
            page_size=self._layout.page_size,
            device=device,
        )
        self._sampler = Sampler(self._table)
        # Traced once; its pieces serve the memory measurement and the real captures alike.
        self._cutter = TorchCompileCutter(self.config.graph.piecewise_cuda_graph_compiler)
        self._stream: DeviceStream = (
            CudaStream(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]
            if device.type == "cuda"
            else CpuStream()
        )
        self.profiler = StepProfiler(runner_config.profile_dir, self._stream.call)
        self._num_pages = 0
        self._runners: RunnerSet | None = None
        self._traced = False
        self._stages.lap("tables")

    @property
    def runners(self) -> RunnerSet:
        """Known after ``build_runners``; for measuring, not for serving."""
        return self._built()

    @property
    def sampler(self) -> Sampler:
        return self._sampler

    @property
    def cuda_stream(self) -> torch.cuda.Stream | None:
        """Where steps run; None on CPU."""
        return self._stream.stream if isinstance(self._stream, CudaStream) else None

    @property
    def limits(self) -> WorkerLimits:
        """Known after ``plan_memory``."""
        assert self._num_pages, "plan_memory() comes first"
        return WorkerLimits(
            num_pages=self._num_pages,
            page_size=_known(self.config.page_size),
            max_running_requests=_known(self.config.max_running_requests),
            context_length=_known(self.config.context_length),
            chunked_prefill_size=_known(self.config.chunked_prefill_size),
            max_total_num_tokens=(self._num_pages - 1) * _known(self.config.page_size),
        )

    def plan_memory(self) -> None:
        """Decides the number of KV pages. On CUDA it captures graphs to measure them.

        Raises:
            MemoryPlanError, torch.OutOfMemoryError: no room; the message names the flags.
        """
        needs = Needs(0, 0, 0)
        if self.device.type == "cuda" and self.config.max_total_tokens is None:
            needs = self._measure()
            logger.info(
                "Memory needs: activations %.2f GB, decode graphs %.2f GB, prefill graphs %.2f GB",
                *(n / GIB for n in (needs.activations, needs.decode_graphs, needs.prefill_graphs)),
            )
        weights = self._weight_bytes
        self._num_pages = plan_pages(self.config, self._layout, self.device, needs, weights)
        self._stages.lap("measure_graphs")

    def build_runners(self) -> None:
        """Allocates the KV pool and makes the runners; captures nothing."""
        self._runners = self._build(self._num_pages)
        pool = self._runners.parts.kv_pool
        logger.info(
            "KV Cache is allocated. #tokens: %d, K size: %.2f GB, V size: %.2f GB",
            pool.num_tokens,
            pool.nbytes / 2 / GIB,
            pool.nbytes / 2 / GIB,
        )
        logger.info("Memory pool end. avail mem=%.2f GB", available_bytes(self.device) / GIB)
        self._stages.lap("kv_pool")

    def capture(self, progress: Progress) -> None:
        """Traces the model, if that has not been done, and captures both phases.

        Args:
            progress: called with a phase (``compiling``, ``capturing_prefill``,
                ``capturing_decode``), sizes done and sizes in all.

        Raises:
            CaptureError: the model cannot be a graph; the note names the flag to go without.
        """
        runners = self._built()
        if not self._traced:
            runners.trace(progress)
            self._traced = True
        if self.config.graph.enable_profile_cuda_graph:
            self._capture_profiled(runners, progress)
        else:
            runners.capture(progress)
        if self.device.type == "cuda":
            # Tensors were filled on the caller's stream, which the worker's is not ordered with.
            torch.cuda.synchronize(self.device)

    def launch(self, batch: ForwardBatch) -> StepOutput:
        """Runs ``batch`` after all that was launched before, and returns at once."""
        return self.launch_with(self._built().pick_runner(batch), batch)

    def launch_with(self, runner: Runner, batch: ForwardBatch) -> StepOutput:
        """As ``launch``, by a runner that the caller has picked; nothing is counted as eager."""
        output = self._stream.launch(batch, partial(self._step, batch, runner))
        self.profiler.step()
        return output

    def graph_stats(self) -> dict[str, Any]:
        """JSON-able figures of both graph runners, for metrics and /server_info.

        ``decode`` and ``prefill`` hold, per captured size, ``seconds`` and ``nbytes`` of the
        capture, ``replays``, ``real`` and ``padded`` rows or tokens, and the ``dropped``
        sizes; ``eager_steps`` counts by phase and reason; ``start_seconds`` by stage, in order;
        ``compiles`` how many Triton kernels were compiled and how many came from the cache;
        ``memory_bytes`` what ``weight`` and ``kv_cache`` hold.
        """
        return {
            **self._built().stats(),
            "start_seconds": dict(self._stages.seconds),
            "compiles": self._compiles.as_dict(),
            "memory_bytes": {
                "weight": self._weight_bytes,
                "kv_cache": self._built().parts.kv_pool.nbytes,
            },
        }

    def close(self) -> None:
        """Waits for what was launched."""
        self._stream.close()
        self.profiler.join()

    def _step(self, batch: ForwardBatch, runner: Runner) -> SampledStep:
        return self._sampler.finish(batch, runner.run(batch))

    def _capture_profiled(self, runners: RunnerSet, progress: Progress) -> None:
        """Captures, and replays the largest size of each phase once, under a profiler."""
        profile = GraphProfile(self.device)
        with profile.record("capture"):
            runners.capture(progress)
        for mode, runner in (
            (ForwardMode.DECODE, runners.decode),
            (ForwardMode.EXTEND, runners.prefill),
        ):
            if runner is not None and runner.sizes:
                batch = dummy_batch(mode, runner.sizes[-1])
                batch.sampling = SamplingBatch()
                with profile.record(f"{mode.value}-{runner.sizes[-1]}", self._stream.call):
                    self.launch_with(runner, batch).wait()
        profile.announce()
        self._stages.lap("profile_graphs")

    def _measure(self) -> Needs:
        runners = self._build(_PAGES_TO_MEASURE_WITH)
        needs = measure_needs(runners, self._sampler, self.config)
        self._traced = True
        self._table.next_tokens.zero_()
        del runners
        release_cached(self.device)
        return needs

    def _build(self, num_pages: int) -> RunnerSet:
        parts = RunnerParts(
            model=self._model,
            cos_sin=self._cos_sin,
            table=self._table,
            buffers=self._buffers,
            kv_pool=KVPool(self._layout, num_pages, self.device),
            attention=self._attention,
            device=self.device,
        )
        return RunnerSet(
            parts=parts,
            sampler=self._sampler,
            backend=self._graph_backend(),
            cutter=self._cutter,
            config=self.config.graph,
            stages=self._stages,
        )

    def _graph_backend(self) -> GraphBackend:
        if isinstance(self._stream, CudaStream):
            return CudaGraphBackend(self._stream.stream)
        return RecordedGraphBackend()

    def _built(self) -> RunnerSet:
        assert self._runners is not None, "build_runners() comes first"
        return self._runners


def _known(value: int | None) -> int:
    """A field that ``resolve_auto`` has filled in."""
    assert value is not None
    return value
