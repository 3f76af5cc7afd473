"""Counters, histograms and the names they are published under."""

from __future__ import annotations

import pytest

from duograph.scheduler.graph_metrics import eager_steps, graph_metrics
from duograph.scheduler.messages import AbortRequest
from duograph.scheduler.stats import Histogram, SchedulerStats, snapshot
from duograph.tests.scheduler.driver import Driver, request

GRAPH_STATS = {
    "recompiles": 0,
    "pool_bytes": 4096,
    "decode": {
        "enabled": True,
        "sizes": {
            "4": {"seconds": 0.5, "nbytes": 100, "replays": 3, "real": 10, "padded": 2},
            "1": {"seconds": 0.25, "nbytes": 50, "replays": 2, "real": 2, "padded": 0},
        },
        "dropped": [],
    },
    "prefill": {"enabled": False, "sizes": {}, "dropped": []},
    "eager_steps": {"decode": {"too_large": 7}, "prefill": {"disabled": 5}},
    "start_seconds": {"weights": 1.5, "capture_decode": 0.75},
    "memory_bytes": {"weight": 3 << 29, "kv_cache": 1 << 30},
}


def test_a_histogram_counts_up_to_each_bound_and_beyond_the_last() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 9.0):
        histogram.observe(value)
    assert histogram.snapshot() == ([1.0, 2.0], [2, 1, 1], 12.0)


def test_gaps_of_one_batch_count_once_per_request() -> None:
    stats = SchedulerStats()
    stats.observe_gaps([1.0, 1.0, 1.0, 1.5], now=2.0)
    stats.observe_gaps([], now=3.0)
    histogram = stats.inter_token_latency
    assert sum(histogram.counts) == 4 and histogram.total == pytest.approx(3.5)


def test_a_request_leaves_its_times_and_tokens() -> None:
    driver = Driver(max_running_requests=1)
    driver.step(request(1, prompt=6, new=3), request(2, prompt=6, new=3), seconds=0.0)
    for _ in range(3):
        driver.step(seconds=1.0)
    stats = driver.scheduler.stats
    assert stats.time_to_first_token.total == 1.0
    assert sum(stats.inter_token_latency.counts) == 2 and stats.inter_token_latency.total == 2.0
    assert stats.e2e_latency.total == 3.0 and stats.decode_time.total == 2.0
    assert stats.queue_time.total == 3.0, "request 2 waited until the row was free"
    assert (stats.prompt_tokens, stats.generation_tokens) == (12, 3)
    driver.step(AbortRequest(2))
    assert stats.aborted == 1


def test_the_snapshot_speaks_sglangs_names_with_their_labels() -> None:
    driver = Driver()
    driver.run(request(1, prompt=list(range(10, 26))))
    driver.step(request(2, prompt=list(range(10, 26)), new=9))
    counters, gauges = graph_metrics(GRAPH_STATS)
    page = snapshot(
        driver.scheduler.stats,
        driver.scheduler.gauges(),
        model_name='a "model"',
        gen_throughput=12.5,
        graph_counters=counters,
        graph_gauges=gauges,
    )
    labels = 'model_name="a \\"model\\"",engine_type="unified",tp_rank="0",pp_rank="0"'
    assert page.gauges[f"sglang:num_running_reqs{{{labels}}}"] == 1.0
    assert page.gauges[f"sglang:cache_hit_rate{{{labels}}}"] == 12 / 32
    assert page.gauges[f"sglang:gen_throughput{{{labels}}}"] == 12.5
    assert page.gauges[f"sglang:is_cuda_graph{{{labels}}}"] == 1.0
    assert page.counters[f"sglang:cached_tokens_total{{{labels}}}"] == 12.0
    passes = "sglang:cuda_graph_passes_total"
    assert page.counters[f'{passes}{{mode="decode_cuda_graph",{labels}}}'] == 5.0
    assert page.counters[f'{passes}{{mode="decode_none",{labels}}}'] == 7.0
    assert page.counters['duograph_graph_replays_total{phase="decode",size="4"}'] == 3.0
    assert page.counters['duograph_graph_padded_tokens_total{phase="decode",size="4"}'] == 2.0
    assert page.counters['duograph_graph_eager_total{phase="prefill",reason="disabled"}'] == 5.0
    assert page.gauges[f'sglang:graph_memory_usage_gb{{phase="decode",{labels}}}'] == 150 / (
        1 << 30
    )
    seconds = f'sglang:startup_cuda_graph_time_seconds{{phase="decode",{labels}}}'
    assert page.gauges[seconds] == 0.75
    assert page.gauges[f'sglang:startup_time_seconds{{phase="weights",{labels}}}'] == 1.5
    assert page.gauges[f"sglang:weight_memory_usage_gb{{{labels}}}"] == 1.5
    assert page.gauges[f"sglang:kv_cache_memory_usage_gb{{{labels}}}"] == 1.0
    _, sizes, total = page.histograms['duograph_graph_batch_size{phase="decode"}']
    assert sizes[0] == 3 and total == 3.0, "three steps of one row"
    assert page.histograms['duograph_graph_batch_size{phase="prefill"}'][2] == 16.0
    bounds, counts, _ = page.histograms[f"sglang:time_to_first_token_seconds{{{labels}}}"]
    assert len(counts) == len(bounds) + 1 and sum(counts) == 1
    assert eager_steps(GRAPH_STATS, "decode") == 7
