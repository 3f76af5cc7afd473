"""How a checkpoint tensor finds its place in a layer, whole or as one rank's shard.

Every layer lists its ``WeightSlot``s under the checkpoint's names; the loader copies tensors
into slots and can tell what is missing or left over. Knows no file format.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import nn

from duograph.kernels.packed_linear import PackedWeight


@dataclass(frozen=True, slots=True)
class TPGroup:
    """This process's place among the tensor-parallel ranks."""

    rank: int = 0
    size: int = 1

    def shard(self, total: int, what: str) -> int:
        """``total`` divided over the ranks.

        Raises:
            ValueError: it does not divide.
        """
        if total % self.size:
            raise ValueError(f"{what} {total} does not divide over tp_size {self.size}")
        return total // self.size


SINGLE = TPGroup()


@dataclass(frozen=True, slots=True)
class WeightSlot:
    """Destination of one checkpoint tensor.

    ``target`` is the (view of a) parameter this rank keeps. ``shard_dim`` is the dimension of
    the checkpoint tensor that is split over the ranks, None if every rank keeps all of it.
    """

    target: torch.Tensor
    shard_dim: int | None = None
    tp: TPGroup = SINGLE

    @property
    def checkpoint_shape(self) -> tuple[int, ...]:
        """Shape the tensor must have in the checkpoint."""
        shape = list(self.target.shape)
        if self.shard_dim is not None:
            shape[self.shard_dim] *= self.tp.size
        return tuple(shape)

    def load(self, tensor: torch.Tensor) -> None:
        """Copies this rank's part, converting the dtype.

        Raises:
            ValueError: the shape is not ``checkpoint_shape``.
        """
        if tuple(tensor.shape) != self.checkpoint_shape:
            raise ValueError(
                f"has shape {list(tensor.shape)}, the config asks for {list(self.checkpoint_shape)}"
            )
        if self.shard_dim is not None:
            size = self.target.shape[self.shard_dim]
            tensor = tensor.narrow(self.shard_dim, self.tp.rank * size, size)
        self.target.copy_(tensor)


@runtime_checkable
class HasWeights(Protocol):
    """A layer with weights of its own."""

    def weight_slots(self, name: str) -> Iterator[tuple[str, WeightSlot]]:
        """Checkpoint name and slot of each tensor; ``name`` is the layer's place in the tree,
        e.g. "model.layers.0.self_attn.qkv_proj"."""


@runtime_checkable
class Packable(Protocol):
    """A layer that can change to a faster weight layout once its weights are loaded."""

    packed: PackedWeight | None

    def can_pack(self) -> bool:
        """True if every weight survives the change."""

    def pack(self) -> None:
        """Changes the layout; afterwards activations are float32."""


def model_weight_slots(model: nn.Module) -> dict[str, WeightSlot]:
    """Every slot of the tree by checkpoint name."""
    slots: dict[str, WeightSlot] = {}
    for name, module in model.named_modules():
        if isinstance(module, HasWeights):
            slots.update(module.weight_slots(name))
    return slots
