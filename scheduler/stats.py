"""What the scheduler counts and times, and the snapshot that frontends publish.

Names follow SGLang's ``sglang:`` metrics so that its dashboards work; duograph's own, per graph
size, come from the worker. Histograms have fixed bounds. Knows no socket and no clock: times
are passed in, in seconds.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from duograph.scheduler.messages import MetricsSnapshot
from duograph.scheduler.step_sizes import StepSizes

# seconds
LATENCY_BOUNDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0),
)
TOKEN_BOUNDS = (
    *(0.0005, 0.001, 0.002, 0.003, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02),
    *(0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0),
)


# rows of a decode step, tokens of a prefill step
SIZE_BOUNDS = tuple(float(1 << power) for power in range(15))


class Histogram:
    """Counts per bucket: value <= bound, and one unbounded bucket at the end."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def snapshot(self) -> tuple[list[float], list[int], float]:
        return list(self.bounds), list(self.counts), self.total


def _latency() -> Histogram:
    return Histogram(LATENCY_BOUNDS)


@dataclass(slots=True)
class SchedulerStats:
    """Counters since start."""

    requests: int = 0  # that passed the door
    finished: int = 0
    refused: int = 0  # at the door: invalid or overloaded
    aborted: int = 0
    timeouts: int = 0
    faults: int = 0  # requests ended by an exception of ours
    ignored: int = 0  # duplicate ids, senders that do not exist
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generation_tokens: int = 0
    wasted_rows: int = 0  # rows computed for a request that had ended
    steps: int = 0  # committed
    extend_steps: int = 0
    decode_steps: int = 0
    time_to_first_token: Histogram = field(default_factory=_latency)
    inter_token_latency: Histogram = field(default_factory=lambda: Histogram(TOKEN_BOUNDS))
    e2e_latency: Histogram = field(default_factory=_latency)
    queue_time: Histogram = field(default_factory=_latency)
    prefill_time: Histogram = field(default_factory=_latency)
    decode_time: Histogram = field(default_factory=_latency)

    decode_sizes: Histogram = field(default_factory=lambda: Histogram(SIZE_BOUNDS))
    prefill_sizes: Histogram = field(default_factory=lambda: Histogram(SIZE_BOUNDS))
    decode_steps_by_size: StepSizes = field(default_factory=StepSizes)
    prefill_steps_by_size: StepSizes = field(default_factory=StepSizes)
    _busy_since: float | None = None  # the last result, if another step was in flight then

    def observe_step(self, is_extend: bool, size: int, now: float, more_in_flight: bool) -> None:
        """A step of ``size`` rows (decode) or tokens (prefill) was committed at ``now``."""
        since = self._busy_since
        seconds = None if since is None else now - since
        self._busy_since = now if more_in_flight else None
        self.steps += 1
        if is_extend:
            self.extend_steps += 1
            self.prefill_sizes.observe(size)
            self.prefill_steps_by_size.observe(size, seconds)
        else:
            self.decode_steps += 1
            self.decode_sizes.observe(size)
            self.decode_steps_by_size.observe(size, seconds)

    def observe_gaps(self, previous: Iterable[float], now: float) -> None:
        """One inter-token gap per entry of ``previous``, the time of the token before. In a
        decode batch nearly all are equal, so runs of equals cost one observation."""
        run, length = 0.0, 0
        for time in previous:
            if time != run:
                if length:
                    self.inter_token_latency.observe(now - run, length)
                run, length = time, 0
            length += 1
        if length:
            self.inter_token_latency.observe(now - run, length)


@dataclass(frozen=True, kw_only=True)
class Gauges:
    """The scheduler's state at one moment."""

    running: int
    waiting: int
    used_tokens: int
    total_tokens: int
    cached_pages: int
    evictions: int
    retractions: int
    new_token_ratio: float


def snapshot(
    stats: SchedulerStats,
    gauges: Gauges,
    *,
    model_name: str,
    gen_throughput: float,
    graph_counters: dict[str, float],
    graph_gauges: dict[str, float],
) -> MetricsSnapshot:
    """Everything at once. ``gen_throughput`` in tokens per second. ``model_name`` is a label of
    the names that SGLang has."""
    hit_rate = stats.cached_tokens / stats.prompt_tokens if stats.prompt_tokens else 0.0
    counters = {
        "sglang:prompt_tokens_total": stats.prompt_tokens,
        "sglang:generation_tokens_total": stats.generation_tokens,
        "sglang:cached_tokens_total": stats.cached_tokens,
        "sglang:num_requests_total": stats.requests,
        "sglang:num_aborted_requests_total": stats.aborted,
        "duograph_requests_refused_total": stats.refused,
        "duograph_requests_timed_out_total": stats.timeouts,
        "duograph_request_faults_total": stats.faults,
        "duograph_messages_ignored_total": stats.ignored,
        "duograph_retractions_total": gauges.retractions,
        "duograph_evicted_pages_total": gauges.evictions,
        "duograph_wasted_rows_total": stats.wasted_rows,
        'duograph_steps_total{mode="extend"}': stats.extend_steps,
        'duograph_steps_total{mode="decode"}': stats.decode_steps,
    }
    levels = {
        "sglang:num_running_reqs": gauges.running,
        "sglang:num_queue_reqs": gauges.waiting,
        "sglang:num_used_tokens": gauges.used_tokens,
        "sglang:token_usage": gauges.used_tokens / gauges.total_tokens,
        "sglang:gen_throughput": gen_throughput,
        "sglang:cache_hit_rate": hit_rate,
        "sglang:max_total_num_tokens": gauges.total_tokens,
        "duograph_prefix_cache_pages": gauges.cached_pages,
        "duograph_new_token_ratio": gauges.new_token_ratio,
    }
    stage = "sglang:per_stage_req_latency_seconds"
    histograms = {
        "sglang:time_to_first_token_seconds": stats.time_to_first_token,
        "sglang:inter_token_latency_seconds": stats.inter_token_latency,
        "sglang:e2e_request_latency_seconds": stats.e2e_latency,
        "sglang:queue_time_seconds": stats.queue_time,
        'duograph_graph_batch_size{phase="decode"}': stats.decode_sizes,
        'duograph_graph_batch_size{phase="prefill"}': stats.prefill_sizes,
        f'{stage}{{stage="queue"}}': stats.queue_time,
        f'{stage}{{stage="prefill"}}': stats.prefill_time,
        f'{stage}{{stage="decode"}}': stats.decode_time,
    }
    label = _sglang_labels(model_name)
    return MetricsSnapshot(
        counters={label(name): float(n) for name, n in {**counters, **graph_counters}.items()},
        gauges={label(name): float(n) for name, n in {**levels, **graph_gauges}.items()},
        histograms={label(name): histogram.snapshot() for name, histogram in histograms.items()},
        step_sizes={
            "decode": stats.decode_steps_by_size.rows(),
            "prefill": stats.prefill_steps_by_size.rows(),
        },
    )


def _sglang_labels(model_name: str) -> Callable[[str], str]:
    """Adds the labels that SGLang's dashboards select by to its names."""
    escaped = model_name.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    labels = f'model_name="{escaped}",engine_type="unified",tp_rank="0",pp_rank="0"'

    def label(name: str) -> str:
        if not name.startswith("sglang:"):
            return name
        if name.endswith("}"):
            return f"{name[:-1]},{labels}}}"
        return f"{name}{{{labels}}}"

    return label
