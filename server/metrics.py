"""The Prometheus page: the scheduler's snapshot and this frontend's own counters.

Every frontend serves the same engine figures, since they come from one snapshot message; its own
figures carry a ``frontend`` label. Knows metric names and the text format's library; does not
know who counts what.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from duograph.scheduler.messages import MetricsSnapshot
from duograph.scheduler.stats import Histogram
from duograph.server.metric_help import HELP

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_LATENCY_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
_GAP_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"')
_ESCAPED = re.compile(r"\\(.)")
_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")


class FrontendMetrics:
    """What one frontend process counts. Times are seconds."""

    def __init__(self) -> None:
        self.responses: dict[int, int] = {}  # HTTP status -> count
        self.active = 0  # generation requests that have not ended
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.aborted = 0  # clients that left, slow readers
        self.time_to_first_token = Histogram(_LATENCY_S)
        self.inter_token_latency = Histogram(_GAP_S)
        self.e2e_latency = Histogram(_LATENCY_S)

    def begin(self, prompt_tokens: int) -> None:
        self.active += 1
        self.prompt_tokens += prompt_tokens

    def first_token(self, seconds: float) -> None:
        self.time_to_first_token.observe(seconds)

    def tokens(self, count: int, seconds: float) -> None:
        """``count`` tokens of one sequence were delivered ``seconds`` after the last ones."""
        self.generation_tokens += count
        self.inter_token_latency.observe(seconds)

    def end(self, seconds: float, *, aborted: bool) -> None:
        self.active -= 1
        self.aborted += aborted
        self.e2e_latency.observe(seconds)

    def response(self, status: int) -> None:
        self.responses[status] = self.responses.get(status, 0) + 1


class _Page:
    """One scrape, as the library's collector interface wants it."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        yield from self._families


def render_page(
    snapshot: MetricsSnapshot | None,
    frontend: FrontendMetrics,
    *,
    frontend_index: int,
    dropped_frames: int,
) -> bytes:
    """The page in the text format."""
    families = _frontend_families(frontend, str(frontend_index), dropped_frames)
    if snapshot is not None:
        families += _snapshot_families(snapshot)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Page(families))
    page: bytes = generate_latest(registry)
    return page


def _frontend_families(own: FrontendMetrics, index: str, dropped_frames: int) -> list[Metric]:
    label = ["frontend"]
    counters = {
        "duograph_frontend_prompt_tokens": (own.prompt_tokens, "prompt tokens accepted"),
        "duograph_frontend_generation_tokens": (own.generation_tokens, "tokens delivered"),
        "duograph_frontend_aborted_requests": (own.aborted, "requests whose client left"),
        "duograph_frontend_dropped_frames": (dropped_frames, "malformed engine messages"),
    }
    families: list[Metric] = []
    for name, (value, text) in counters.items():
        counter = CounterMetricFamily(name, text, labels=label)
        counter.add_metric([index], value)
        families.append(counter)
    active = GaugeMetricFamily(
        "duograph_frontend_active_requests", "generation requests in flight", labels=label
    )
    active.add_metric([index], own.active)
    responses = CounterMetricFamily(
        "duograph_frontend_responses", "HTTP responses by status", labels=["frontend", "status"]
    )
    for status, count in sorted(own.responses.items()):
        responses.add_metric([index, str(status)], count)
    families += [active, responses]
    for name, text, histogram in (
        ("time_to_first_token", "from acceptance to the first token", own.time_to_first_token),
        ("inter_token_latency", "between deliveries of one request", own.inter_token_latency),
        ("e2e_request_latency", "from acceptance to the end", own.e2e_latency),
    ):
        family = HistogramMetricFamily(
            f"duograph_frontend_{name}_seconds", f"seconds {text}", labels=label
        )
        buckets = _cumulative(list(histogram.bounds), histogram.counts)
        family.add_metric([index], buckets, histogram.total)
        families.append(family)
    return families


def _snapshot_families(snapshot: MetricsSnapshot) -> list[Metric]:
    families: dict[str, Metric] = {}
    for kinds, family_type in (
        (snapshot.counters, CounterMetricFamily),
        (snapshot.gauges, GaugeMetricFamily),
    ):
        for full_name, value in kinds.items():
            name, labels = split_name(full_name)
            family = _family(families, family_type, name, labels)
            family.add_metric(list(labels.values()), value)
    for full_name, (bounds, counts, total) in snapshot.histograms.items():
        name, labels = split_name(full_name)
        family = _family(families, HistogramMetricFamily, name, labels)
        family.add_metric(list(labels.values()), _cumulative(bounds, counts), total)
    return list(families.values())


def _family(
    families: dict[str, Metric], family_type: Any, name: str, labels: dict[str, str]
) -> Any:
    # a name with other label names is a family of its own to the library, which keeps the text
    key = f"{name}|{','.join(labels)}"
    if key not in families:
        base = name.removesuffix("_total") if family_type is CounterMetricFamily else name
        text = HELP.get(base, base.replace("_", " "))
        families[key] = family_type(name, text, labels=list(labels))
    return families[key]


def split_name(full_name: str) -> tuple[str, dict[str, str]]:
    """``name{a="x",b="y"}`` in its parts, the values as they were before they were escaped."""
    match = _NAME.match(full_name)
    name = match[0] if match else "unnamed"
    labels = _LABEL.findall(full_name[len(name) :])
    return name, {key: _ESCAPED.sub(_unescaped, value) for key, value in labels}


def _unescaped(match: re.Match[str]) -> str:
    return "\n" if match[1] == "n" else match[1]


def _cumulative(bounds: list[float], counts: list[int]) -> list[tuple[str, float]]:
    buckets, so_far = [], 0
    for bound, count in zip([*map(str, bounds), "+Inf"], counts, strict=False):
        so_far += count
        buckets.append((bound, float(so_far)))
    return buckets
