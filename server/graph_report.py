"""GET /graphs: what each graph costs, saves and wastes, and what would be better.

Joins what the engine told once (captures, memory, the start) with its last snapshot (replays,
eager steps, actual sizes, load), and asks ``graph_advice`` for sizes to add or drop. Dicts for
JSON; nothing is asked of the engine, and what it told is only read. Knows no page.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from duograph.scheduler.graph_advice import Cost, Use, advise, unchanged
from duograph.scheduler.messages import EngineInfo, MetricsSnapshot
from duograph.server.metrics import split_name
from duograph.server.serving import Serving

_PHASES = ("decode", "prefill")
_PER_SIZE = {
    "duograph_graph_replays_total": "replays",
    "duograph_graph_real_tokens_total": "real",
    "duograph_graph_padded_tokens_total": "padded",
}
_LAST_REPLAY = "duograph_graph_last_replay_timestamp_seconds"
_EAGER = "duograph_graph_eager_total"
_COUNTED = frozenset({*_PER_SIZE, _LAST_REPLAY, _EAGER})
_SIZES_FLAG = {"decode": "cuda_graph_bs", "prefill": "piecewise_cuda_graph_tokens"}
_MAX_FLAG = {"decode": "cuda_graph_max_bs", "prefill": "piecewise_cuda_graph_max_tokens"}
_LOAD = {
    "sglang:num_running_reqs": "running",
    "sglang:num_queue_reqs": "queued",
    "sglang:num_used_tokens": "kv_used_tokens",
    "sglang:max_total_num_tokens": "kv_total_tokens",
    "sglang:gen_throughput": "tokens_per_second",
    "sglang:cache_hit_rate": "prefix_cache_hit_rate",
}
_LATENCIES = {
    "sglang:time_to_first_token_seconds": "time_to_first_token",
    "sglang:inter_token_latency_seconds": "inter_token_latency",
    "sglang:queue_time_seconds": "queue_time",
}
_QUANTILES = (0.5, 0.95, 0.99)


def graphs(serving: Serving) -> dict[str, Any]:
    """``decode`` and ``prefill`` hold, by captured size, ``seconds`` and ``nbytes`` of the capture
    and what has been replayed since: ``replays``, ``real`` and ``padded`` rows or tokens; once it
    was used also ``last_used``, in seconds since 1970, and ``step_ms``. Beside ``sizes`` stand
    ``totals``, ``steps_by_size`` (``size``, the largest of a bin; ``steps``; ``total`` rows or
    tokens; ``ms`` a step, or null) and ``advice``. ``eager_steps`` counts steps without a graph by
    phase and reason. ``memory`` is in bytes, ``latency`` in seconds since the start. ``counters``
    are the same figures under their names in /metrics."""
    engine = serving.engine
    info, snapshot = engine.info, engine.snapshot
    captured: dict[str, Any] = info.details.get("graphs", {}) if info is not None else {}
    answer = {name: value for name, value in captured.items() if name not in _PHASES}
    for phase in _PHASES:
        known = captured.get(phase, {})
        sizes = known.get("sizes", {})
        if not isinstance(sizes, dict):
            sizes = {str(size): {} for size in sizes}
        answer[phase] = {**known, "sizes": {size: dict(one) for size, one in sizes.items()}}
    counted: dict[str, float] = {}
    if snapshot is not None:
        _add_counts(answer, snapshot)
        for kinds in (snapshot.counters, snapshot.gauges):
            counted |= {k: v for k, v in kinds.items() if k.startswith("duograph_graph")}
    for phase in _PHASES:
        eager = answer.get("eager_steps", {}).get(phase, {})
        answer[phase]["totals"] = _totals(answer[phase]["sizes"], eager)
        answer[phase]["steps_by_size"] = _steps_by_size(snapshot, phase)
        _add_step_ms(answer[phase]["sizes"], snapshot, phase)
        answer[phase]["advice"] = _advice(phase, answer[phase], info, serving.config.server_info)
    return {
        **answer,
        "model": serving.config.served_names[0],
        "status": "draining" if serving.draining else engine.status.phase,
        "progress": {"done": engine.status.done, "total": engine.status.total},
        "memory": _memory(answer, info),
        "load": _load(snapshot),
        "latency": _latency(snapshot),
        "counters": counted,
    }


def _add_counts(answer: dict[str, Any], snapshot: MetricsSnapshot) -> None:
    eager: dict[str, dict[str, int]] = {phase: {} for phase in _PHASES}
    for full_name, value in (*snapshot.counters.items(), *snapshot.gauges.items()):
        if full_name.partition("{")[0] not in _COUNTED:
            continue
        name, labels = split_name(full_name)
        phase = labels["phase"]
        if name == _EAGER:
            eager[phase][labels["reason"]] = int(value)
            continue
        size = answer[phase]["sizes"].setdefault(labels["size"], {})
        if name == _LAST_REPLAY:
            size["last_used"] = value
        else:
            size[_PER_SIZE[name]] = int(value)
    answer["eager_steps"] = eager


def _totals(sizes: Mapping[str, Mapping[str, Any]], eager: Mapping[str, int]) -> dict[str, Any]:
    """Of one phase: what its graphs cost (capture), save (replays) and waste (padding, sizes that
    no request has used). ``hit_rate`` is null before the first step."""

    def total(name: str) -> Any:
        return sum(one.get(name, 0) for one in sizes.values())

    replays, eager_steps = total("replays"), sum(eager.values())
    unused = [one for one in sizes.values() if "last_used" not in one]
    steps = replays + eager_steps
    return {
        "sizes": len(sizes),
        "capture_seconds": total("seconds"),
        "nbytes": total("nbytes"),
        "replays": replays,
        "eager_steps": eager_steps,
        "hit_rate": replays / steps if steps else None,
        "real": total("real"),
        "padded": total("padded"),
        "unused_sizes": len(unused),
        "unused_seconds": sum(one.get("seconds", 0.0) for one in unused),
        "unused_nbytes": sum(one.get("nbytes", 0) for one in unused),
    }


def _steps_by_size(snapshot: MetricsSnapshot | None, phase: str) -> list[dict[str, Any]]:
    rows = [] if snapshot is None else snapshot.step_sizes.get(phase, [])
    return [
        {
            "size": size,
            "steps": steps,
            "total": total,
            "ms": 1000.0 * seconds / timed if timed else None,
        }
        for size, steps, total, timed, seconds in rows
    ]


def _add_step_ms(
    sizes: dict[str, dict[str, Any]], snapshot: MetricsSnapshot | None, phase: str
) -> None:
    """``step_ms`` of each captured size: the mean over the steps whose size it holds."""
    if snapshot is None:
        return
    ascending = sorted(map(int, sizes))
    times: dict[int, tuple[int, float]] = {}
    for largest, _, _, timed, seconds in snapshot.step_sizes.get(phase, []):
        index = bisect_left(ascending, largest)
        if timed and index < len(ascending):
            before = times.get(ascending[index], (0, 0.0))
            times[ascending[index]] = (before[0] + timed, before[1] + seconds)
    for size, (timed, seconds) in times.items():
        sizes[str(size)]["step_ms"] = 1000.0 * seconds / timed


def _advice(
    phase: str, figures: Mapping[str, Any], info: EngineInfo | None, flags: Mapping[str, Any]
) -> dict[str, Any] | None:
    """None before the engine has told its limits. ``flag`` is a line to copy, empty if there is
    nothing to change; ``seconds_added`` and ``nbytes_added`` are the cost of all changes."""
    if info is None:
        return None
    limit = info.max_running_requests
    if phase == "prefill":
        limit = int(info.details.get("chunked_prefill_size", info.max_total_num_tokens))
    captured = {
        int(size): Cost(float(one.get("seconds", 0.0)), int(one.get("nbytes", 0)))
        for size, one in figures["sizes"].items()
    }
    uses = [Use(row["size"], row["steps"], row["total"]) for row in figures["steps_by_size"]]
    advice = advise(captured, uses, limit=limit, refused=figures.get("dropped", ()))
    if phase == "decode" and flags.get("disable_cuda_graph_padding"):
        # only exact sizes are replayed: each one is needed, and none is padded to
        reason = "padding is off: every size is captured"
        advice = unchanged(advice, tuple(sorted(captured)), reason)
    signs = {"add": 1, "drop": -1}
    return {
        **asdict(advice),
        "seconds_added": sum(signs[one.action] * one.cost.seconds for one in advice.changes),
        "nbytes_added": sum(signs[one.action] * one.cost.nbytes for one in advice.changes),
        "flag": _flag(phase, advice.sizes, flags) if advice.changes else "",
    }


def _flag(phase: str, sizes: tuple[int, ...], flags: Mapping[str, Any]) -> str:
    """With the flag for the largest size, where it is in use and would refuse the list."""
    name, limit = _SIZES_FLAG[phase], _MAX_FLAG[phase]
    words = [_spelled(name), *map(str, sizes)]
    given = flags.get(limit)
    if isinstance(given, int) and given < sizes[-1]:
        words += [_spelled(limit), str(sizes[-1])]
    return " ".join(words)


def _spelled(field: str) -> str:
    return "--" + field.replace("_", "-")


def _memory(answer: Mapping[str, Any], info: EngineInfo | None) -> dict[str, Any]:
    """Bytes of the device after the start. ``other`` is what is neither of the named parts nor
    free: activations, libraries, other processes. ``kv_token`` is what one token's KV takes."""
    if info is None:
        return {}
    held = answer.get("memory_bytes", {})
    parts = {
        "weights": held.get("weight", 0),
        "kv_cache": held.get("kv_cache", 0),
        "decode_graphs": answer["decode"]["totals"]["nbytes"],
        "prefill_graphs": answer["prefill"]["totals"]["nbytes"],
    }
    device = info.details.get("memory", {})
    if "total" in device:
        parts["free"] = device["free"]
        parts["other"] = max(0, device["total"] - sum(parts.values()))
        parts["total"] = device["total"]
    tokens = info.max_total_num_tokens
    return {
        **parts,
        "kv_token": parts["kv_cache"] // tokens if tokens else 0,
        "device": info.details.get("device"),
    }


def _load(snapshot: MetricsSnapshot | None) -> dict[str, float]:
    gauges = {} if snapshot is None else snapshot.gauges
    found: dict[str, float] = {}
    for full_name, value in gauges.items():
        name = full_name.partition("{")[0]
        if name in _LOAD:
            found[_LOAD[name]] = value
    return found


def _latency(snapshot: MetricsSnapshot | None) -> dict[str, Any]:
    """Per measure: ``count``, ``mean`` and the quantiles, which are null before the first value."""
    found: dict[str, Any] = {}
    histograms = {} if snapshot is None else snapshot.histograms
    for full_name, (bounds, counts, total) in histograms.items():
        name = full_name.partition("{")[0]
        if name in _LATENCIES:
            number = sum(counts)
            found[_LATENCIES[name]] = {
                "count": number,
                "mean": total / number if number else None,
                **{f"p{100 * q:.0f}": _quantile(bounds, counts, q) for q in _QUANTILES},
            }
    return found


def _quantile(bounds: list[float], counts: list[int], q: float) -> float | None:
    """Linear within a bucket; the last bound if it lies beyond (no less is known)."""
    number = sum(counts)
    if not number:
        return None
    rank, so_far, lower = q * number, 0, 0.0
    for bound, count in zip(bounds, counts, strict=False):
        if count and so_far + count >= rank:
            return lower + (bound - lower) * (rank - so_far) / count
        so_far, lower = so_far + count, bound
    return bounds[-1]
