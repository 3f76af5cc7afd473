"""The document that the engine process starts from, sent as JSON over an inherited pipe.
Frozen and torch-free: the supervisor writes it."""

from __future__ import annotations

from dataclasses import dataclass

from duograph.runners.config import RunnerConfig
from duograph.scheduler.config import SchedulerConfig


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """All that the engine process is told."""

    runner: RunnerConfig
    scheduler: SchedulerConfig
    run_dir: str  # private folder of the sockets: see channel.py
    num_frontends: int
    parent_pid: int
    model_folder: str  # what runner.model_path was resolved to
    served_name: str  # the model_name label of the metrics
    log_level: str = "info"
    log_format: str = "text"
    spawned_at: float | None = None  # CLOCK_MONOTONIC, seconds, when this was written
