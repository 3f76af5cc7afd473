"""From a model folder to a worker, and what is printed on the way."""

from __future__ import annotations

from duograph.runners.worker import WorkerLimits
from duograph.scheduler.model_worker import limits_line
from duograph.scheduler.process import start_line


def test_the_limits_are_printed_in_the_words_that_scripts_look_for() -> None:
    limits = WorkerLimits(
        num_pages=101,
        page_size=16,
        max_running_requests=32,
        context_length=8192,
        chunked_prefill_size=512,
        max_total_num_tokens=1600,
    )
    assert limits_line(limits, 17.5) == (
        "max_total_num_tokens=1600, chunked_prefill_size=512, max_prefill_tokens=512, "
        "max_running_requests=32, context_len=8192, available_gpu_mem=17.50 GB, page_size=16"
    )


def test_the_start_line_names_every_stage_that_took_a_while_and_their_sum() -> None:
    line = start_line({"process": 0.52, "kv_pool": 0.03, "capture_decode": 2.0})
    assert line == "Engine started in 2.5 s: process 0.5, capture_decode 2.0"
