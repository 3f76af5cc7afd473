"""From "choose for me" to a complete configuration.

``resolve_auto`` fills in every None and "auto" from the model and the device and refuses
combinations that cannot work, naming the flag. Nothing is changed in place, and resolving a
resolved configuration changes nothing. Sizes that need measuring (the KV pool) are not here.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import replace

import torch

from duograph.runners.attention_choice import choose_backends
from duograph.runners.buckets import (
    clip_sizes,
    get_batch_sizes_to_capture,
    get_token_levels_to_capture,
)
from duograph.runners.config import ConfigError, GraphConfig, RunnerConfig
from duograph.runners.memory import GIB, total_bytes
from duograph.runners.model_config import ModelConfig

# By device memory: below 20, 35, 60, 160 GiB, and above. The running limit is at the same time
# the largest decode graph: a limit above it would leave a full server in eager mode for good.
_MEMORY_STEPS = (20 * GIB, 35 * GIB, 60 * GIB, 160 * GIB)
_CUDA_CHUNK = (2048, 4096, 4096, 8192, 16384)
_CUDA_RUNNING = (64, 128, 128, 256, 512)
_CPU_CHUNK = 512
# A tile of 64 keys then lies in one page and is read without a look-up for each key: on one H200
# prefill attention over 8192 tokens took 682 us a layer (64 dimensions a head), 1041 with 16.
_CUDA_PAGE = 64
_CPU_PAGE = 16
_CPU_RUNNING = 32


def resolve_device(name: str) -> str:
    """ "cuda" or "cpu" from "auto", "cuda" or "cpu".

    Raises:
        ConfigError: CUDA was asked for and there is none.
    """
    has_cuda = torch.cuda.is_available()
    if name == "auto":
        return "cuda" if has_cuda else "cpu"
    if name == "cuda" and not has_cuda:
        raise ConfigError("--device cuda: torch sees no CUDA device here; use --device cpu")
    return name


def resolve_auto(
    config: RunnerConfig,
    model_config: ModelConfig,
    device: torch.device,
    *,
    total_memory: int | None = None,
) -> RunnerConfig:
    """A complete configuration for ``device``.

    Args:
        total_memory: bytes of a GPU that need not be here; left out, the device is asked.

    Raises:
        ConfigError: a flag that this device or model cannot honour.
    """
    on_cuda = device.type == "cuda"
    context = config.context_length or model_config.context_length
    if context > model_config.context_length:
        raise ConfigError(
            f"--context-length {context} is above the model's {model_config.context_length}"
        )
    if on_cuda and total_memory is None:
        total_memory = total_bytes(device)
    step = bisect_right(_MEMORY_STEPS, total_memory or 0)
    chunk = config.chunked_prefill_size or (_CUDA_CHUNK[step] if on_cuda else _CPU_CHUNK)
    running = (
        config.max_running_requests
        or config.graph.cuda_graph_max_bs
        or (_CUDA_RUNNING[step] if on_cuda else _CPU_RUNNING)
    )
    chunk = min(chunk, context)
    dtype = model_config.dtype if config.dtype == "auto" else config.dtype
    return replace(
        choose_backends(config, dtype, model_config.head_dim, device),
        device=device.type,
        dtype=dtype,
        context_length=context,
        page_size=config.page_size or (_CUDA_PAGE if on_cuda else _CPU_PAGE),
        max_running_requests=running,
        chunked_prefill_size=chunk,
        graph=_resolve_graphs(config.graph, device.type, running=running, chunk=chunk),
    )


def _resolve_graphs(
    graph: GraphConfig, device_type: str, *, running: int, chunk: int
) -> GraphConfig:
    none = graph.disable_cuda_graph and graph.disable_piecewise_cuda_graph
    if graph.enable_profile_cuda_graph and none:
        raise ConfigError(
            "--enable-profile-cuda-graph has nothing to profile: --disable-cuda-graph and "
            "--disable-piecewise-cuda-graph are both given"
        )
    if device_type == "cpu":
        # Code that a compiler generated does not consist of ATen ops: nothing to record.
        if graph.enable_torch_compile:
            raise ConfigError("--enable-torch-compile needs a CUDA device: CPU graphs are recorded")
        if graph.piecewise_cuda_graph_compiler == "inductor":
            raise ConfigError(
                "--piecewise-cuda-graph-compiler inductor needs a CUDA device: CPU graphs are "
                "recorded; use eager"
            )
    max_bs = min(graph.cuda_graph_max_bs or running, running)
    max_tokens = min(graph.piecewise_cuda_graph_max_tokens or chunk, chunk)
    if graph.cuda_graph_bs:
        sizes = clip_sizes(graph.cuda_graph_bs, running)
    else:
        sizes = get_batch_sizes_to_capture(
            max_bs, device_type=device_type, disable_padding=graph.disable_cuda_graph_padding
        )
    if graph.piecewise_cuda_graph_tokens:
        levels = clip_sizes(graph.piecewise_cuda_graph_tokens, chunk)
    else:
        levels = get_token_levels_to_capture(max_tokens, device_type=device_type)
    compiler = graph.piecewise_cuda_graph_compiler
    return replace(
        graph,
        cuda_graph_max_bs=sizes[-1],
        cuda_graph_bs=sizes,
        piecewise_cuda_graph_max_tokens=levels[-1],
        piecewise_cuda_graph_tokens=levels,
        # Measured on one H200, 1B model, 16 to 8192 tokens: Inductor's pieces are as fast to
        # within 1 % from 128 tokens on and 5 % faster at 16, as the fused kernels leave it
        # little to do; compiling every layer adds 13 s to the start.
        piecewise_cuda_graph_compiler="eager" if compiler == "auto" else compiler,
    )
