"""``python -m duograph.tests.scheduler.fake_engine --config-fd N``: the real engine process
around a fake worker. What goes wrong is chosen by the last word of ``model_folder``."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from duograph.runners.config_file import ModelError
from duograph.scheduler.engine_config import EngineConfig
from duograph.scheduler.model_worker import LoadedWorker, Progress
from duograph.scheduler.process import read_config, run_engine
from duograph.tests.scheduler.fake_worker import LIMITS, FakeWorker

WARM_UP_STEPS = 9  # process.warm_up: three generations of three tokens


def load_fake(config: EngineConfig, progress: Progress) -> LoadedWorker:
    kind = Path(config.model_folder).name
    progress("loading_weights", 0, 2)
    if kind == "broken-model":
        raise ModelError("config.json: num_heads is missing")
    if kind == "unreadable-model":
        raise OSError("cannot read model.safetensors")
    progress("capturing_decode", 1, 2)
    if kind == "out-of-memory":
        raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
    if kind == "slow-start":
        time.sleep(60)
    fail_at = WARM_UP_STEPS + 4 if kind == "device-error" else None
    seconds = 60.0 if kind == "hangs" else 0.002
    worker = FakeWorker(seconds_per_step=0.0, fail_at_step=fail_at)
    progress("warming_up", 0, 0)
    loaded = LoadedWorker(worker, LIMITS, False, {"kind": kind})
    _slow_down_after_warm_up(worker, seconds)
    return loaded


def _slow_down_after_warm_up(worker: FakeWorker, seconds: float) -> None:
    launch = worker.launch

    def launch_and_slow_down(batch):  # type: ignore[no-untyped-def]
        if len(worker.launched) == WARM_UP_STEPS:
            worker._seconds = seconds
        return launch(batch)

    worker.launch = launch_and_slow_down  # type: ignore[method-assign]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--config-fd", type=int, required=True)
    sys.exit(run_engine(read_config(parser.parse_args().config_fd), load_fake))
