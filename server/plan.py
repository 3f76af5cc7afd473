"""``duograph plan``: what a start would do, without a GPU and without loading anything.

Prints the sizes that would be captured and where the memory would go, and says which figures are
exact and which are predictions. Takes every flag of ``duograph serve``.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from duograph.runners.model_config import ModelConfig
from duograph.runners.model_config import ModelError as ModelConfigError
from duograph.scheduler.exit_codes import ExitCode
from duograph.server.arg_checks import check_together
from duograph.server.args import ServeConfig, parse_serve
from duograph.server.model_cache import ModelError
from duograph.server.model_store import LocalModel, resolve_model
from duograph.server.options import UsageError, did_you_mean

if TYPE_CHECKING:
    from duograph.runners.config import RunnerConfig
    from duograph.runners.predict import MemoryPrediction

USAGE = """usage: duograph plan [MODEL] [--gpu NAME | --gpu-memory GIB | --device cpu] [flags]

Shows the sizes that would be captured and where the memory of a card would go, without a card.
MODEL needs its config.json alone. Takes every flag of duograph serve (duograph serve --help=all).

  --gpu NAME          one of: {names}
  --gpu-memory GIB    a card of so much memory; left out, the one in this machine
  --json              the same figures as JSON
"""
# GiB, as the driver reports them, rounded down.
CARDS: Mapping[str, float] = MappingProxyType(
    {
        "b200": 178.0, "h200": 139.8, "h100": 79.1, "a100-80gb": 79.1, "a100-40gb": 39.3,
        "l40s": 44.4, "l4": 22.0, "a10g": 22.0, "t4": 14.5, "rtx6000-ada": 47.4, "rtx5090": 31.3,
        "rtx4090": 23.5, "rtx3090": 23.5, "rtx4060ti-16gb": 15.5,
    }
)  # fmt: skip
_GIB = 1 << 30
_EXACT, _GUESS = "exact", "prediction; the start measures it"


@dataclass(frozen=True)
class Card:
    """A device to plan for. ``memory`` in bytes; None for the CPU of this machine."""

    name: str
    memory: int | None


def main(arguments: Sequence[str], environ: Mapping[str, str]) -> ExitCode:
    """Raises UsageError for flags that ``duograph serve`` would refuse too."""
    if any(word in ("-h", "--help") for word in arguments):
        print(USAGE.format(names=", ".join(CARDS)), end="")
        return ExitCode.OK
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--gpu")
    parser.add_argument("--gpu-memory")
    parser.add_argument("--json", action="store_true")
    try:
        own, flags = parser.parse_known_args(list(arguments))
    except argparse.ArgumentError as error:
        raise UsageError(str(error)) from error
    config = parse_serve(flags, environ)
    for line in (*config.notes, *check_together(config)):
        print(line, file=sys.stderr)
    card = _card(own.gpu, own.gpu_memory, config)
    from duograph.runners.config import ConfigError
    from duograph.runners.memory_plan import MemoryPlanError

    try:
        # only config.json is looked at, as for weights that would be drawn
        model = resolve_model(
            config.runner.model_path, "dummy", environ, lambda line: print(line, file=sys.stderr)
        )
        figures = plan(config, model, card)
    except (ModelError, ModelConfigError) as error:
        print(f"duograph: error: {error}", file=sys.stderr)
        return ExitCode.MODEL
    except MemoryPlanError as error:
        shape = ModelConfig.from_folder(model.folder)
        print(
            f"duograph: error: on {card.name}: {error}; the weights are {shape.num_parameters:,} "
            "parameters",
            file=sys.stderr,
        )
        return ExitCode.OUT_OF_MEMORY
    except ConfigError as error:
        raise UsageError(str(error)) from error
    print(json.dumps(figures, indent=2) if own.json else _report(figures), end="\n")
    return ExitCode.OK


def plan(config: ServeConfig, model: LocalModel, card: Card) -> dict[str, Any]:
    """JSON-able. Raises ModelError, ConfigError or MemoryPlanError."""
    import torch

    from duograph.runners.predict import predict_memory
    from duograph.runners.resolve import resolve_auto

    shape = ModelConfig.from_folder(model.folder)
    runner = config.runner
    device = torch.device("cpu" if card.memory is None else "cuda")
    if card.memory is not None and runner.attention_backend == "auto":
        runner = replace(runner, attention_backend="triton")  # the choice needs the card itself
    resolved = resolve_auto(runner, shape, device, total_memory=card.memory)
    memory = None if card.memory is None else predict_memory(resolved, shape, card.memory)
    return {
        "model": model.name,
        "parameters": shape.num_parameters,
        "device": card.name,
        **_sizes(resolved),
        "memory": None if memory is None else _memory(memory),
    }


def _sizes(resolved: RunnerConfig) -> dict[str, Any]:
    graph = resolved.graph
    return {
        "dtype": resolved.dtype,
        "context_length": resolved.context_length,
        "page_size": resolved.page_size,
        "max_running_requests": resolved.max_running_requests,
        "chunked_prefill_size": resolved.chunked_prefill_size,
        "decode_sizes": [] if graph.disable_cuda_graph else list(graph.cuda_graph_bs or ()),
        "prefill_levels": []
        if graph.disable_piecewise_cuda_graph
        else list(graph.piecewise_cuda_graph_tokens or ()),
    }


def _memory(memory: MemoryPrediction) -> dict[str, Any]:
    return {**asdict(memory), "kv_tokens": memory.kv_tokens}


def _card(name: str | None, gib: str | None, config: ServeConfig) -> Card:
    if name is not None and gib is not None:
        raise UsageError("--gpu and --gpu-memory are both given; one says enough")
    if gib is not None:
        try:
            amount = float(gib)
        except ValueError:
            amount = 0.0
        if not 1.0 <= amount <= 10_000.0:
            raise UsageError(f"--gpu-memory must be a number of GiB from 1 on, got {gib!r}")
        return Card(f"a card of {amount:g} GiB", int(amount * _GIB))
    if name is not None:
        key = name.lower()
        if key not in CARDS:
            raise UsageError(
                f"--gpu {name} is not known{did_you_mean(key, list(CARDS))}; known are "
                f"{', '.join(CARDS)}; --gpu-memory takes any"
            )
        return Card(f"{name.upper()} ({CARDS[key]:g} GiB)", int(CARDS[key] * _GIB))
    if config.runner.device == "cpu":
        return Card("the CPU", None)
    return _card_here()


def _card_here() -> Card:
    import torch

    if not torch.cuda.is_available():
        raise UsageError(
            "there is no GPU here; name one with --gpu or --gpu-memory, or --device cpu"
        )
    properties = torch.cuda.get_device_properties(0)
    return Card(properties.name, int(properties.total_memory))


def _report(figures: Mapping[str, Any]) -> str:
    lines = [
        f"{figures['model']}, {figures['parameters']:,} parameters, {figures['dtype']}, "
        f"on {figures['device']}",
        f"Limits: context {figures['context_length']}, {figures['max_running_requests']} running "
        f"requests, {figures['chunked_prefill_size']} tokens a prefill step, pages of "
        f"{figures['page_size']}",
        _list("Decode graphs", "sizes", figures["decode_sizes"]),
        _list("Prefill pieces", "levels", figures["prefill_levels"]),
    ]
    memory = figures["memory"]
    if memory is None:
        return "\n".join(
            [*lines, "Memory: the KV pool takes a quarter of what is free, 1 GiB most"]
        )
    rows = (
        ("weights", _EXACT),
        ("tables", _EXACT),
        ("activations", _GUESS),
        ("decode_graphs", _GUESS),
        ("prefill_graphs", _GUESS),
        ("reserve", "CUDA itself and fragmentation, assumed"),
        ("kv_pool", "what is left, and of use"),
    )
    lines.append(f"Memory, GiB of {memory['total'] / _GIB:.1f}")
    for name, note in rows:
        lines.append(f"  {name.replace('_', ' '):15}{memory[name] / _GIB:8.2f}  {note}")
    tokens, context = memory["kv_tokens"], figures["context_length"]
    lines.append(
        f"KV pool: {tokens:,} tokens of {memory['bytes_per_token'] / 1024:g} KiB, "
        f"{tokens / context:.1f} requests of the whole context"
    )
    return "\n".join(lines)


def _list(title: str, unit: str, sizes: Sequence[int]) -> str:
    if not sizes:
        return f"{title}: none"
    return f"{title}, {len(sizes)} {unit}: {' '.join(map(str, sizes))}"
