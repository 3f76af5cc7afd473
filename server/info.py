"""What the server says of itself: flags, limits, model. Dicts for JSON, made from what
the engine has told; nothing is asked for."""

from __future__ import annotations

from typing import Any

from duograph.server.serving import Serving


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
