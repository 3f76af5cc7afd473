"""What a person wants to know of a start: a few lines when it worked, and the numbers behind an
out-of-memory when it did not. Formats figures of the runner floor; decides nothing."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from duograph.scheduler.admission import EngineLimits
from duograph.scheduler.engine_config import EngineConfig

_log = logging.getLogger(__name__)

_GIB = 1 << 30
_PHASES = (("decode", "sizes", "bs"), ("prefill", "levels", "tokens"))


def summary_lines(
    details: Mapping[str, Any], limits: EngineLimits, stats: Mapping[str, Any]
) -> list[str]:
    """``details`` of LoadedWorker, ``stats`` as ``ModelWorker.graph_stats`` gives them."""
    memory = stats.get("memory_bytes", {})
    model = [str(details[key]) for key in ("architecture", "dtype", "device") if key in details]
    if "weight" in memory:
        model.append(f"{memory['weight'] / _GIB:.2f} GB of weights")
    pool = f"{limits.max_total_num_tokens:,} tokens in pages of {limits.page_size}"
    if "kv_cache" in memory:
        pool += f", {memory['kv_cache'] / _GIB:.2f} GB"
    return [
        f"Model: {', '.join(model)}",
        f"KV pool: {pool}; context {limits.context_length}, "
        f"{limits.max_running_requests} requests at once, "
        f"{limits.chunked_prefill_size} tokens a prefill step",
        f"Graphs: {'; '.join(_phase(stats[name], *words) for name, *words in _PHASES)}; "
        f"{stats['pool_bytes'] / _GIB:.2f} GB",
    ]


def _phase(phase: Mapping[str, Any], unit: str, of: str) -> str:
    name = "decode" if of == "bs" else "prefill"
    sizes: Mapping[str, Any] = phase["sizes"]
    if not phase["enabled"]:
        return f"{name} off"
    if not sizes:
        return f"{name} none captured"
    seconds = sum(one["seconds"] for one in sizes.values())
    text = f"{name} {len(sizes)} {unit} up to {max(map(int, sizes))} {of} in {seconds:.1f} s"
    dropped = phase["dropped"]
    return text + (f", {len(dropped)} dropped for want of memory" if dropped else "")


def memory_numbers(config: EngineConfig) -> str:
    """One sentence with what the model and the flags take and what the device has, for whoever
    must choose a flag to lower; empty if that cannot be told any more."""
    import torch

    from duograph.runners.config import ConfigError
    from duograph.runners.config_file import ModelError
    from duograph.runners.kv_pool import KVLayout
    from duograph.runners.memory import available_bytes, total_bytes
    from duograph.runners.model_config import ModelConfig
    from duograph.runners.resolve import resolve_auto, resolve_device

    try:
        device = torch.device(resolve_device(config.runner.device))
        model = ModelConfig.from_folder(config.model_folder)
        resolved = resolve_auto(config.runner, model, device)
        free, total = available_bytes(device), total_bytes(device)
    except (ModelError, ConfigError, RuntimeError, OSError) as error:
        _log.debug("no numbers for the memory: %s", error)  # the first error is what counts
        return ""
    dtype: torch.dtype = getattr(torch, resolved.dtype)
    layout = KVLayout(model.num_layers, model.num_kv_heads, model.head_dim, 1, dtype)
    graph = resolved.graph
    flags = [
        f"--max-running-requests {resolved.max_running_requests}",
        f"--context-length {resolved.context_length}",
        f"--chunked-prefill-size {resolved.chunked_prefill_size}",
    ]
    if not graph.disable_cuda_graph:
        flags.append(f"--cuda-graph-max-bs {graph.cuda_graph_max_bs}")
    if not graph.disable_piecewise_cuda_graph:
        flags.append(f"--piecewise-cuda-graph-max-tokens {graph.piecewise_cuda_graph_max_tokens}")
    if resolved.mem_fraction_static is not None:
        flags.append(f"--mem-fraction-static {resolved.mem_fraction_static}")
    return (
        f"The weights take {model.num_parameters * dtype.itemsize / _GIB:.2f} GB in "
        f"{resolved.dtype} and a token of the KV pool {layout.bytes_per_token / 1024:g} KiB; "
        f"{device.type} has {total / _GIB:.2f} GB, {free / _GIB:.2f} GB of it free; in force: "
        f"{', '.join(flags)}"
    )
