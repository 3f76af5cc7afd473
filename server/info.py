"""What the server says of itself: flags, limits, model, graphs. Dicts for JSON, made from what
the engine has told; nothing is asked for."""

from __future__ import annotations

from typing import Any

from duograph.scheduler.messages import MetricsSnapshot
from duograph.server.metrics import split_name
from duograph.server.serving import Serving

_PER_SIZE = {
    "duograph_graph_replays_total": "replays",
    "duograph_graph_real_tokens_total": "real",
    "duograph_graph_padded_tokens_total": "padded",
}


def server_info(serving: Serving) -> dict[str, Any]:
    """Flags at the top level, as SGLang has them; the engine's own words in internal_states."""
    engine = serving.engine
    info = engine.info
    state: dict[str, Any] = {
        "phase": engine.status.phase,
        "running": engine.heartbeat.running,
        "waiting": engine.heartbeat.waiting,
        "finished_steps": engine.heartbeat.steps,
    }
    limits: dict[str, Any] = {}
    if info is not None:
        state |= info.details
        limits = {
            "max_total_num_tokens": info.max_total_num_tokens,
            "max_running_requests": info.max_running_requests,
            "context_length": info.context_length,
            "vocab_size": info.vocab_size,
        }
    gauges = {} if engine.snapshot is None else engine.snapshot.gauges
    for name, value in gauges.items():  # what SGLang's benchmark reads
        if name.startswith("sglang:gen_throughput"):
            state["last_gen_throughput"] = value
    return {
        **serving.config.server_info,
        **limits,
        "served_model_name": list(serving.config.served_names),
        "status": "draining" if serving.draining else engine.status.phase,
        "internal_states": [state],
    }


def model_info(serving: Serving) -> dict[str, Any]:
    """SGLang's fields that have a meaning here, and the limits that a client can run into."""
    info = serving.engine.info
    details = {} if info is None else info.details
    given = serving.config.server_info.get("model_path")
    return {
        "model_path": given or serving.config.served_names[0],
        "tokenizer_path": given or serving.config.served_names[0],
        "served_model_name": serving.config.served_names[0],
        "is_generation": True,
        "has_image_understanding": False,
        "has_audio_understanding": False,
        "has_chat_template": serving.translator.template.available,
        "architectures": [details["architecture"]] if "architecture" in details else [],
        "dtype": details.get("dtype"),
        "max_model_len": info.context_length if info else serving.config.context_length,
        "vocab_size": info.vocab_size if info else None,
    }


def graphs(serving: Serving) -> dict[str, Any]:
    """``decode`` and ``prefill`` hold, by captured size, ``seconds`` and ``nbytes`` of the capture
    and what has been replayed since: ``replays``, ``real`` and ``padded`` rows or tokens;
    ``eager_steps`` counts steps without a graph by phase and reason. ``counters`` are the same
    figures under their names in /metrics."""
    info, snapshot = serving.engine.info, serving.engine.snapshot
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
    return {**answer, "counters": counted}


_PHASES = ("decode", "prefill")


def _add_counts(answer: dict[str, Any], snapshot: MetricsSnapshot) -> None:
    eager: dict[str, dict[str, int]] = {phase: {} for phase in _PHASES}
    for full_name, value in snapshot.counters.items():
        name, labels = split_name(full_name)
        phase = labels.get("phase", "")
        if phase not in _PHASES:
            continue
        if name == "duograph_graph_eager_total":
            eager[phase][labels["reason"]] = int(value)
        elif name in _PER_SIZE:
            size = answer[phase]["sizes"].setdefault(labels["size"], {})
            size[_PER_SIZE[name]] = int(value)
    answer["eager_steps"] = eager
