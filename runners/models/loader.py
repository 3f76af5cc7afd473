"""From a RunnerConfig and a checked ModelConfig to a model that is ready to run.

Weights are streamed: one checkpoint tensor at a time is copied to its slot. A tensor that is
missing, left over or of the wrong shape is an error that names it; nothing is guessed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from duograph.runners.config import RunnerConfig
from duograph.runners.layers.weights import model_weight_slots
from duograph.runners.model_config import ModelConfig, ModelError
from duograph.runners.models.dummy import fill_with_dummy_weights
from duograph.runners.models.llama import CausalLM, create_model
from duograph.runners.models.safetensors_folder import iterate_tensors, weight_files

logger = logging.getLogger(__name__)

Progress = Callable[[int, int], None]  # tensors done, tensors in all
_NAMES_SHOWN = 8
# Buffers that some checkpoints carry and that are computed here from the config.
_COMPUTED_SUFFIXES = ("rotary_emb.inv_freq",)


@torch.no_grad()
def load_model(
    runner_config: RunnerConfig,
    model_config: ModelConfig,
    device: torch.device,
    progress: Progress | None = None,
) -> CausalLM:
    """Creates the model on ``device`` and fills it.

    Args:
        runner_config: ``model_path`` is a folder (a GGUF file has to be converted before),
            ``dtype`` "auto" follows the model, ``load_format`` "dummy" reads no weights.
        progress: called with (tensors loaded, tensors expected) after each tensor.

    Raises:
        ModelError: the folder's weights do not fit the config; names files and tensors.
    """
    dtype = resolve_dtype(runner_config.dtype, model_config)
    if model_config.context_clipped_from is not None:
        logger.warning(
            "context length is %d, not %d: layers with a sliding window of that size would "
            "answer differently beyond it",
            model_config.context_length,
            model_config.context_clipped_from,
        )
    if runner_config.load_format == "dummy":
        model = create_model(model_config, dtype=dtype, device=device)
        fill_with_dummy_weights(model)
    else:
        files = weight_files(Path(runner_config.model_path))
        model = create_model(model_config, dtype=dtype, device=device)
        load_weights(model, files, progress)
    if model.pack_for_cpu():
        logger.info("CPU: %s weights packed as float16, activations in float32", dtype)
    return model


def resolve_dtype(name: str, model_config: ModelConfig) -> torch.dtype:
    """The torch dtype of "auto" or of a dtype name."""
    resolved: torch.dtype = getattr(torch, model_config.dtype if name == "auto" else name)
    return resolved


@torch.no_grad()
def load_weights(model: CausalLM, files: list[Path], progress: Progress | None = None) -> None:
    """Fills every slot of ``model`` from safetensors ``files``.

    Raises:
        ModelError: a tensor is missing, left over, given twice or of the wrong shape.
    """
    slots = model_weight_slots(model)
    total = len(slots)
    leftover: list[str] = []
    for name, tensor, path in iterate_tensors(files):
        slot = slots.pop(name, None)
        if slot is None:
            if not _is_redundant(name, model):
                leftover.append(name)
            continue
        try:
            slot.load(tensor)
        except ValueError as error:
            raise ModelError(f"{path}: {name}: {error}") from error
        if progress is not None:
            progress(total - len(slots), total)
    folder = files[0].parent
    if slots:
        raise ModelError(f"{folder}: missing tensors: {_some(slots)}")
    if leftover:
        raise ModelError(f"{folder}: tensors the model has no place for: {_some(leftover)}")


def _is_redundant(name: str, model: CausalLM) -> bool:
    """True for a copy of the tied embedding and for buffers that the config determines."""
    if name == "lm_head.weight":
        return model.lm_head.is_tied
    return name.endswith(_COMPUTED_SUFFIXES)


def _some(names: Iterable[str]) -> str:
    """The first names, and how many more there are."""
    listed = sorted(names)
    more = len(listed) - _NAMES_SHOWN
    text = ", ".join(listed[:_NAMES_SHOWN])
    return f"{text} and {more} more" if more > 0 else text
