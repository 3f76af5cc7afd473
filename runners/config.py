"""Configuration of the runner floor. Frozen; torch-free, so that the supervisor may read it.

``None`` means "choose for me": ``resolve_auto`` (see ``resolve.py``) returns a new, complete
config and changes nothing in place. The ``option`` metadata is what the command line is
derived from: one dataclass field = one flag, one environment twin, one line of help.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


class ConfigError(ValueError):
    """A flag that cannot be honoured here; the message names it."""


def option(
    default: Any,
    help: str,
    *,
    group: str,
    choices: tuple[str, ...] | None = None,
    flag: str | None = None,
    minimum: float | None = None,
    maximum: float | None = None,
    metavar: str | None = None,
) -> Any:
    """A dataclass field that is also a command-line flag.

    ``flag`` defaults to the field's name with dashes. Lists are given as space-separated
    values. ``minimum`` and ``maximum`` are inclusive and are checked by the command line.
    """
    metadata = {
        "help": help,
        "group": group,
        "choices": choices,
        "flag": flag,
        "minimum": minimum,
        "maximum": maximum,
        "metavar": metavar,
    }
    return field(default=default, metadata=metadata)


MAX_PROFILED_STEPS = 200  # of one /start_profile

DECODE_GROUP = "CUDA graphs, decode"
PREFILL_GROUP = "CUDA graphs, prefill"
MEMORY_GROUP = "Memory & scheduling"
MODEL_GROUP = "Model"
ATTENTION_BACKENDS = ("auto", "flashinfer", "triton", "torch")
DEBUG_GROUP = "Debug"
MAX_ROWS = 65_536  # of one decode step: buffers and schedules are made for so many


@dataclass(frozen=True, kw_only=True)
class GraphConfig:
    """Both graph runners. On CPU the same runners work on recorded graphs."""

    cuda_graph_max_bs: int | None = option(
        None,
        "largest decode batch size to capture",
        group=DECODE_GROUP,
        minimum=1,
        maximum=MAX_ROWS,
    )
    cuda_graph_bs: tuple[int, ...] | None = option(
        None,
        "exact decode batch sizes to capture",
        group=DECODE_GROUP,
        minimum=1,
        maximum=MAX_ROWS,
    )
    disable_cuda_graph: bool = option(False, "run decode without graphs", group=DECODE_GROUP)
    disable_cuda_graph_padding: bool = option(
        False,
        "capture every batch size up to the maximum and never pad",
        group=DECODE_GROUP,
    )
    enable_torch_compile: bool = option(
        False,
        "compile the decode forward with Inductor inside the graph; at the one size that was "
        "measured on an H200 it gained nothing, and the start took a minute more",
        group=DECODE_GROUP,
    )
    torch_compile_max_bs: int = option(
        32, "largest decode batch size that is compiled", group=DECODE_GROUP, minimum=1
    )
    enable_profile_cuda_graph: bool = option(
        False,
        "profile the captures and one replay of each phase; the log names the folder",
        group=DEBUG_GROUP,
    )
    piecewise_cuda_graph_max_tokens: int | None = option(
        None, "largest prefill step, in tokens, that runs as pieces", group=PREFILL_GROUP, minimum=1
    )
    piecewise_cuda_graph_tokens: tuple[int, ...] | None = option(
        None, "exact prefill token levels to capture", group=PREFILL_GROUP, minimum=1
    )
    disable_piecewise_cuda_graph: bool = option(
        False, "run prefill without graphs", group=PREFILL_GROUP
    )
    piecewise_cuda_graph_compiler: str = option(
        "auto",
        "compiler of the pieces; auto is eager, which measured as fast and starts sooner",
        group=PREFILL_GROUP,
        choices=("auto", "eager", "inductor"),
    )


@dataclass(frozen=True, kw_only=True)
class RunnerConfig:
    """The model, its memory and its kernels."""

    model_path: str = option(
        "",
        "folder with config.json and safetensors, a .gguf file, or a hub id; "
        "empty = the default model",
        group=MODEL_GROUP,
    )
    load_format: str = option(
        "auto",
        "auto reads the weights; dummy draws seeded random ones from config.json alone",
        group=MODEL_GROUP,
        choices=("auto", "safetensors", "gguf", "dummy"),
    )
    dtype: str = option(
        "auto",
        "compute and weight type; auto follows the model's config",
        group=MODEL_GROUP,
        choices=("auto", "bfloat16", "float16", "float32"),
    )
    device: str = option(
        "auto", "auto is cuda if there is one", group=MODEL_GROUP, choices=("auto", "cuda", "cpu")
    )
    context_length: int | None = option(
        None,
        "longest prompt + output, in tokens; from the model if left out",
        group=MODEL_GROUP,
        minimum=1,
    )
    attention_backend: str = option(
        "auto",
        "attention kernels of both phases; auto is torch on CPU and on CUDA what measured best",
        group=MODEL_GROUP,
        choices=ATTENTION_BACKENDS,
    )
    prefill_attention_backend: str | None = option(
        None,
        "attention kernels of prefill; --attention-backend decides if left out",
        group=MODEL_GROUP,
        choices=ATTENTION_BACKENDS,
    )
    decode_attention_backend: str | None = option(
        None,
        "attention kernels of decode; --attention-backend decides if left out",
        group=MODEL_GROUP,
        choices=ATTENTION_BACKENDS,
    )
    mem_fraction_static: float | None = option(
        None,
        "share of device memory for weights and KV pool",
        group=MEMORY_GROUP,
        minimum=0.01,
        maximum=0.99,
    )
    max_running_requests: int | None = option(
        None,
        "most requests that run at once",
        group=MEMORY_GROUP,
        minimum=1,
        maximum=MAX_ROWS,
    )
    max_total_tokens: int | None = option(
        None,
        "size of the KV pool in tokens; from free memory if left out",
        group=MEMORY_GROUP,
        minimum=1,
    )
    chunked_prefill_size: int | None = option(
        None, "most prompt tokens of one prefill step", group=MEMORY_GROUP, minimum=1
    )
    page_size: int | None = option(
        None,
        "tokens of one KV page; 64 on CUDA and 16 on CPU if left out",
        group=MEMORY_GROUP,
        minimum=1,
        maximum=256,
    )
    profile_dir: str | None = option(
        None,
        "folder for the traces of /start_profile; the temporary folder if left out",
        group=DEBUG_GROUP,
    )
    graph: GraphConfig = field(default_factory=GraphConfig)
