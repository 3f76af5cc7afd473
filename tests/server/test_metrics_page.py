"""The Prometheus page: every engine metric under the names of the SGLang dashboard, in a format
that Prometheus itself accepts."""

from __future__ import annotations

import shutil
import subprocess
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from duograph.scheduler.grammar_gate import GrammarStats
from duograph.scheduler.graph_metrics import graph_metrics
from duograph.scheduler.last_use import LastUse
from duograph.scheduler.stats import snapshot
from duograph.server.metric_help import HELP
from duograph.server.metrics import FrontendMetrics, render_page
from duograph.tests.scheduler.driver import Driver, request
from duograph.tests.scheduler.test_stats import GRAPH_STATS

# Of SGLang's own dashboard, with the labels that it selects by.
DASHBOARD = {
    "sglang:e2e_request_latency_seconds",
    "sglang:time_to_first_token_seconds",
    "sglang:inter_token_latency_seconds",
    "sglang:num_running_reqs",
    "sglang:num_queue_reqs",
    "sglang:gen_throughput",
    "sglang:cache_hit_rate",
    "sglang:token_usage",
    "sglang:num_used_tokens",
    "sglang:prompt_tokens",
    "sglang:generation_tokens",
    "sglang:num_requests",
}


NO_REPLAYS: dict[str, Any] = {"decode": {"sizes": {}}, "prefill": {"sizes": {}}}


@pytest.fixture(scope="module")
def page() -> str:
    driver = Driver()
    driver.run(request(1, prompt=16))
    counters, gauges = graph_metrics(GRAPH_STATS)
    last_use = LastUse()
    last_use.update(NO_REPLAYS, 1.0)
    gauges |= last_use.update(GRAPH_STATS, 1.8e9)
    figures = snapshot(
        driver.scheduler.stats,
        driver.scheduler.gauges(),
        model_name='odd "name"\\',
        gen_throughput=1.0,
        graph_counters=counters | GrammarStats().as_metrics(),
        graph_gauges=gauges,
    )
    own = FrontendMetrics()
    own.begin(16)
    own.first_token(0.01)
    own.response(200)
    return render_page(figures, own, frontend_index=0, dropped_frames=0).decode()


def test_the_dashboards_names_are_there_with_its_labels(page: str) -> None:
    families = {family.name: family for family in text_string_to_metric_families(page)}
    assert families.keys() >= DASHBOARD
    for name in DASHBOARD:
        for sample in families[name].samples:
            assert sample.labels["model_name"] == 'odd "name"\\'


def test_every_engine_metric_says_what_it_is(page: str) -> None:
    for family in text_string_to_metric_families(page):
        if not family.name.startswith("duograph_frontend"):
            assert family.documentation == HELP[family.name], family.name


def test_no_help_is_for_a_metric_that_does_not_exist(page: str) -> None:
    assert {family.name for family in text_string_to_metric_families(page)} >= HELP.keys()


def test_histograms_are_whole(page: str) -> None:
    for family in text_string_to_metric_families(page):
        if family.type != "histogram":
            continue
        series: dict[tuple[tuple[str, str], ...], list[float]] = {}
        for sample in family.samples:
            labels = tuple(sorted((k, v) for k, v in sample.labels.items() if k != "le"))
            if sample.name.endswith("_bucket"):
                series.setdefault(labels, []).append(sample.value)
        assert series, family.name
        for buckets in series.values():
            assert buckets == sorted(buckets)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_promtool_accepts_the_page(page: str) -> None:
    done = subprocess.run(
        ["promtool", "check", "metrics"], input=page, capture_output=True, text=True, timeout=30
    )
    assert done.returncode in (0, 3), done.stderr
    lint = (done.stdout + done.stderr).splitlines()
    assert all(line.startswith("sglang:") for line in lint), "names that are SGLang's to choose"
