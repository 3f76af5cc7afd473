"""The real worker for process.py: config and weights from a folder, then the graph runners.

Apart from process.py because it imports torch and the model, which takes seconds: the process
can say "starting" before.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from duograph.runners.stages import StageClock
from duograph.scheduler.admission import EngineLimits
from duograph.scheduler.engine import Worker
from duograph.scheduler.engine_config import EngineConfig
from duograph.scheduler.messages import Phase

if TYPE_CHECKING:
    import torch

    from duograph.runners.worker import WorkerLimits

_log = logging.getLogger(__name__)

Progress = Callable[[Phase, int, int], None]  # phase, done, total


@dataclass(frozen=True)
class LoadedWorker:
    worker: Worker
    limits: EngineLimits
    is_cuda: bool
    details: dict[str, Any]  # JSON-able, for /server_info
    stages: StageClock = field(default_factory=StageClock)  # of the start so far


def load_worker(config: EngineConfig, progress: Progress) -> LoadedWorker:
    """Loads, plans memory, captures. Raises what the runner floor raises."""
    stages = StageClock()
    import torch

    from duograph.runners.resolve import resolve_device

    runner = replace(config.runner, model_path=config.model_folder)
    device = torch.device(resolve_device(runner.device))
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="device") as behind_imports:
        awake = behind_imports.submit(wake_device, device)
        from duograph.runners.memory import GIB, available_bytes, total_bytes
        from duograph.runners.model_config import ModelConfig
        from duograph.runners.models.loader import load_model
        from duograph.runners.worker import ModelWorker

        if not runner.graph.disable_piecewise_cuda_graph:
            import torch._dynamo  # the tracer, in time for the trace

        stages.lap("imports")
        awake.result()
    progress("loading_weights", 0, 0)
    model_config = ModelConfig.from_folder(Path(config.model_folder))
    free_before, started = available_bytes(device), time.monotonic()
    _log.info("Load weight begin. avail mem=%.2f GB", free_before / GIB)
    stages.lap("device")
    model = load_model(
        runner, model_config, device, lambda done, total: progress("loading_weights", done, total)
    )
    free = available_bytes(device)
    _log.info(
        "Load weight end. elapsed=%.2f s, type=%s, avail mem=%.2f GB, mem usage=%.2f GB.",
        time.monotonic() - started,
        model_config.architecture,
        free / GIB,
        (free_before - free) / GIB,
    )
    stages.lap("weights")
    progress("planning_memory", 0, 0)  # the worker's tables are the first part of it

    def report(phase: str, done: int, total: int) -> None:
        progress(cast(Phase, phase), done, total)

    worker = ModelWorker(runner, model_config, model, device, stages, report)
    worker.plan_memory()
    worker.build_runners()
    worker.capture(report)
    limits = worker.limits
    _log.info("%s", limits_line(limits, available_bytes(device) / GIB))
    engine_limits = EngineLimits(
        num_pages=limits.num_pages,
        page_size=limits.page_size,
        max_running_requests=limits.max_running_requests,
        context_length=limits.context_length,
        chunked_prefill_size=limits.chunked_prefill_size,
        vocab_size=model_config.vocab_size,
        eos_token_ids=model_config.eos_token_ids,
    )
    details = {
        "device": str(device),
        "architecture": model_config.architecture,
        "dtype": worker.config.dtype,
        "attention_backend": worker.config.attention_backend,
        "prefill_attention_backend": worker.config.prefill_attention_backend,
        "decode_attention_backend": worker.config.decode_attention_backend,
        "memory": {"total": total_bytes(device), "free": available_bytes(device)},
    }
    return LoadedWorker(worker, engine_limits, device.type == "cuda", details, stages)


def wake_device(device: torch.device) -> None:
    """Makes the CUDA context and the matrix library's handle, which needs half a second and no
    interpreter. Nothing on the CPU."""
    import torch

    if device.type == "cuda":
        ones = torch.ones(16, 16, dtype=torch.bfloat16, device=device)
        torch.mm(ones, ones)
        torch.cuda.synchronize(device)


def limits_line(limits: WorkerLimits, free_gib: float) -> str:
    """What was decided, in SGLang's words. ``free_gib`` is of the device, which may be the CPU."""
    chunk = limits.chunked_prefill_size  # no step takes more, over all its prompts
    return (
        f"max_total_num_tokens={limits.max_total_num_tokens}, chunked_prefill_size={chunk}, "
        f"max_prefill_tokens={chunk}, max_running_requests={limits.max_running_requests}, "
        f"context_len={limits.context_length}, available_gpu_mem={free_gib:.2f} GB, "
        f"page_size={limits.page_size}"
    )
