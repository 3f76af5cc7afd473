"""The worker's figures of both graph runners as metric names: replays, padding and captures per
size, eager steps by reason. Knows the shape of ``ModelWorker.graph_stats`` and nothing else."""

from __future__ import annotations

from typing import Any

_PHASES = ("decode", "prefill")
_GIB = 1 << 30


def graph_metrics(stats: dict[str, Any]) -> tuple[dict[str, float], dict[str, float]]:
    """(counters, gauges). ``phase`` is decode or prefill; sizes are rows or tokens."""
    counters: dict[str, float] = {"duograph_graph_recompiles_total": float(stats["recompiles"])}
    gauges: dict[str, float] = {"duograph_graph_pool_bytes": float(stats["pool_bytes"])}
    gauges |= _start_figures(stats)
    for phase in _PHASES:
        replays = 0
        for size, one in stats[phase]["sizes"].items():
            labels = f'{{phase="{phase}",size="{size}"}}'
            counters[f"duograph_graph_replays_total{labels}"] = float(one["replays"])
            counters[f"duograph_graph_real_tokens_total{labels}"] = float(one["real"])
            counters[f"duograph_graph_padded_tokens_total{labels}"] = float(one["padded"])
            gauges[f"duograph_graph_capture_seconds{labels}"] = float(one["seconds"])
            gauges[f"duograph_graph_capture_bytes{labels}"] = float(one["nbytes"])
            replays += one["replays"]
        eager = stats["eager_steps"][phase]
        for reason, count in eager.items():
            labels = f'{{phase="{phase}",reason="{reason}"}}'
            counters[f"duograph_graph_eager_total{labels}"] = float(count)
        passes = "sglang:cuda_graph_passes_total"
        counters[f'{passes}{{mode="{phase}_cuda_graph"}}'] = float(replays)
        counters[f'{passes}{{mode="{phase}_none"}}'] = float(sum(eager.values()))
    decode = stats["decode"]
    gauges["sglang:is_cuda_graph"] = float(bool(decode["enabled"] and decode["sizes"]))
    return counters, gauges


def _start_figures(stats: dict[str, Any]) -> dict[str, float]:
    """What the start took, under the names of SGLang 0.5.23. GB are 2^30 bytes, as there."""
    figures: dict[str, float] = {}
    for stage, seconds in stats.get("start_seconds", {}).items():
        figures[f'sglang:startup_time_seconds{{phase="{stage}"}}'] = float(seconds)
    for part, nbytes in stats.get("memory_bytes", {}).items():
        figures[f"sglang:{part}_memory_usage_gb"] = nbytes / _GIB
    for phase in _PHASES:
        sizes = stats[phase]["sizes"].values()
        label = f'{{phase="{phase}"}}'
        nbytes, seconds = (sum(one[name] for one in sizes) for name in ("nbytes", "seconds"))
        figures[f"sglang:graph_memory_usage_gb{label}"] = nbytes / _GIB
        figures[f"sglang:startup_cuda_graph_time_seconds{label}"] = float(seconds)
        figures[f"duograph_graph_dropped_sizes{label}"] = float(len(stats[phase]["dropped"]))
    return figures


def eager_steps(stats: dict[str, Any], phase: str) -> int:
    """Steps of ``phase`` that ran without a graph since start."""
    return sum(stats["eager_steps"][phase].values())
