"""The spellings of other servers and releases, put into our own before the command line is read.

Each use leaves one line that says what became of it, so that nobody believes in a flag that is
not there. Knows names of flags and nothing of what they do.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from duograph.server.options import UsageError

# Other name -> ours, with the same meaning and value.
ALIASES: Mapping[str, str] = MappingProxyType(
    {
        # vLLM
        "max-model-len": "context-length",
        "max-num-seqs": "max-running-requests",
        "max-num-batched-tokens": "chunked-prefill-size",
        "scheduling-policy": "schedule-policy",
        "max-cudagraph-capture-size": "cuda-graph-max-bs",
        "cudagraph-capture-sizes": "cuda-graph-bs",
        # SGLang 0.5.23
        "cuda-graph-max-bs-decode": "cuda-graph-max-bs",
        "cuda-graph-bs-decode": "cuda-graph-bs",
        "disable-decode-cuda-graph": "disable-cuda-graph",
        "cuda-graph-max-bs-prefill": "piecewise-cuda-graph-max-tokens",
        "cuda-graph-bs-prefill": "piecewise-cuda-graph-tokens",
        "disable-prefill-cuda-graph": "disable-piecewise-cuda-graph",
    }
)
SILENT_ALIASES: Mapping[str, str] = MappingProxyType({"model": "model-path"})
# Switches -> ours.
_SWITCHES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "enforce-eager": ("--disable-cuda-graph", "--disable-piecewise-cuda-graph"),
        "no-enable-prefix-caching": ("--disable-radix-cache",),
        "no-async-scheduling": ("--disable-overlap-schedule",),
        # the smallest number goes first, as vLLM has it and SGLang with low-priority-values-first
        "enable-priority-scheduling": ("--schedule-policy=priority",),
    }
)
# Switches for what is always so here.
_ALWAYS: Mapping[str, str] = MappingProxyType(
    {
        "enable-metrics": "/metrics is always there",
        "enable-cache-report": "usage always tells the cached tokens",
        "enable-prompt-tokens-details": "usage always tells the cached tokens",
        "enable-request-id-headers": "every answer has an x-request-id",
        "enable-prefix-caching": "the prefix cache is on unless --disable-radix-cache is given",
        "enable-chunked-prefill": "prompts are always cut at --chunked-prefill-size",
        "async-scheduling": "steps overlap unless --disable-overlap-schedule is given",
        "trust-remote-code": "no code that comes with a model is ever run",
        "enable-auto-tool-choice": "tools are served whenever a request has them",
        "disable-log-requests": "prompts are never logged",
        "schedule-low-priority-values-first": "it is so with --schedule-policy priority",
    }
)


def normalised(arguments: Sequence[str], notes: list[str]) -> list[str]:
    """``arguments`` in our own spelling: underscores become dashes and aliases our flags, in
    flags only. ``notes`` gets one line for each alias. Raises UsageError for a value that cannot
    be honoured."""
    result: list[str] = []
    words = list(arguments)
    while words:
        argument = words.pop(0)
        if argument == "--":
            return [*result, "--", *words]
        if argument == "-cc":
            argument = "--compilation-config"
        if not argument.startswith("--"):
            result.append(argument)
            continue
        name, equals, value = argument[2:].partition("=")
        name = name.replace("_", "-")
        if name in _ALWAYS:
            notes.append(f"--{name} changes nothing: {_ALWAYS[name]}")
        elif name in _SWITCHES:
            notes.append(f"--{name} is an alias of {' '.join(_SWITCHES[name])}")
            result += _SWITCHES[name]
        elif name in _WITH_VALUE:
            if not equals:
                if not words:
                    raise UsageError(f"--{name} needs a value")
                value = words.pop(0)
            result += _WITH_VALUE[name](name, value, notes)
        else:
            if name in ALIASES:
                notes.append(f"--{name} is an alias of --{ALIASES[name]}")
            name = ALIASES.get(name, SILENT_ALIASES.get(name, name))
            result.append(f"--{name}{equals}{value}")
    return result


def _graph_backend(name: str, value: str, notes: list[str]) -> list[str]:
    phase, flag = {
        "cuda-graph-backend-decode": ("decode", "--disable-cuda-graph"),
        "cuda-graph-backend-prefill": ("prefill", "--disable-piecewise-cuda-graph"),
    }[name]
    if value == "disabled":
        notes.append(f"--{name} disabled is an alias of {flag}")
        return [flag]
    kind = "full" if phase == "decode" else "piecewise"
    if value not in (kind, "auto"):
        raise UsageError(f"--{name} must be disabled, auto or {kind}, got {value!r}")
    notes.append(f"--{name} {value} changes nothing: {phase} has {kind} graphs")
    return []


def _memory_utilization(name: str, value: str, notes: list[str]) -> list[str]:
    notes.append(
        f"--{name} is taken as --mem-fraction-static: weights and KV pool, with graphs and "
        "activations beside it; left out, all of it is measured"
    )
    return [f"--mem-fraction-static={value}"]


def _one_gpu(name: str, value: str, notes: list[str]) -> list[str]:
    if value != "1":
        raise UsageError(f"--{name} must be 1: one GPU serves the model, got {value!r}")
    return []


def _prefill_tokens(name: str, value: str, notes: list[str]) -> list[str]:
    notes.append(f"--{name} changes nothing: --chunked-prefill-size bounds a prefill step")
    return []


def _stream_interval(name: str, value: str, notes: list[str]) -> list[str]:
    if value != "1":
        notes.append(f"--{name} changes nothing: tokens that wait go out in one chunk")
    return []


_NO_GRAPHS = ("--disable-cuda-graph", "--disable-piecewise-cuda-graph")
_MODES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "NONE": _NO_GRAPHS,
        "PIECEWISE": _NO_GRAPHS[:1],
        "FULL_DECODE_ONLY": _NO_GRAPHS[1:],
        "FULL_AND_PIECEWISE": (),
    }
)


def _compilation_config(name: str, value: str, notes: list[str]) -> list[str]:
    """vLLM's JSON: the three keys that speak of graphs."""
    try:
        config: Any = json.loads(value)
    except ValueError:
        config = None
    if not isinstance(config, dict):
        raise UsageError(f"--{name} must be a JSON object, got {value!r}")
    words: list[str] = []
    for key, setting in config.items():
        if key == "cudagraph_mode" and setting in _MODES:
            words += _MODES[setting]
        elif key == "cudagraph_capture_sizes" and isinstance(setting, list):
            words.append(f"--cuda-graph-bs={','.join(map(str, setting))}")
        elif key == "max_cudagraph_capture_size":
            words.append(f"--cuda-graph-max-bs={setting}")
        else:
            raise UsageError(
                f"--{name}: {key} = {setting!r} is not known; cudagraph_mode "
                f"({', '.join(_MODES)}), cudagraph_capture_sizes and max_cudagraph_capture_size are"
            )
    notes.append(f"--{name} is taken as {' '.join(words) or 'the default'}")
    return words


_WITH_VALUE: Mapping[str, Callable[[str, str, list[str]], list[str]]] = MappingProxyType(
    {
        "cuda-graph-backend-decode": _graph_backend,
        "cuda-graph-backend-prefill": _graph_backend,
        "gpu-memory-utilization": _memory_utilization,
        "tensor-parallel-size": _one_gpu,
        "tp-size": _one_gpu,
        "tp": _one_gpu,
        "max-prefill-tokens": _prefill_tokens,
        "stream-interval": _stream_interval,
        "compilation-config": _compilation_config,
    }
)
