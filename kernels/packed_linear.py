"""Linear layers on CPU with 16-bit weights: FBGEMM's packed half-precision GEMM.

Why not F.linear in bfloat16: on a CPU without AVX-512 it is a plain dot-product loop per row.
Milliseconds for all 121 matrices of a 135M model on AVX2 cores, best of many:

    rows, threads      bfloat16 F.linear   float32 F.linear   this file
    1, one thread             40                  56              32
    8, two threads           142                 120              37
    64, two threads         1087                 356             165

One row costs little more than reading the weights once (29 ms for as many bytes on that core).
Activations and sums are float32. Weights are kept as float16, which holds every bfloat16 value
of magnitude 2**-14 .. 65504 exactly and smaller ones to within 2**-25.

This file knows no layer and no model.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import torch

from duograph.kernels.custom_op import register_custom_op

FLOAT16_MAX = 65504.0


class PackedWeight:
    """A weight [out_features, in_features] in FBGEMM's own layout, with an optional bias.

    Attributes:
        handle: the int by which the op finds it, as an op takes tensors and numbers only.
        nbytes: memory of the packed copy.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Packs a copy; the caller may free ``weight``.

        Raises:
            ValueError: a value is outside of float16's range or not a number.
        """
        if not fits_float16(weight):
            raise ValueError(f"weight is not within [-{FLOAT16_MAX}, {FLOAT16_MAX}]")
        self.out_features: int = weight.shape[0]
        self.nbytes = 2 * weight.numel()
        self.handle = next(_HANDLES)
        # The bare operator: the wrapper for ops with object arguments costs 5 us more a call.
        self._operator = torch.ops.quantized.linear_dynamic_fp16.default._op
        self._packed: Any = torch.ops.quantized.linear_prepack_fp16(
            weight.float(), None if bias is None else bias.float()
        )
        _PACKED[self.handle] = self

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        """float32 [..., in_features] to float32 [..., out_features]."""
        out: torch.Tensor = self._operator(x, self._packed)
        return out


# Part of the op registry: which object a handle stands for. Weak, so a dropped model is freed.
_PACKED: weakref.WeakValueDictionary[int, PackedWeight] = weakref.WeakValueDictionary()
_HANDLES = itertools.count()


def is_available() -> bool:
    """True if this build of torch has FBGEMM, i.e. on x86 with AVX2."""
    return "fbgemm" in torch.backends.quantized.supported_engines


def fits_float16(weight: torch.Tensor) -> bool:
    """True if every value is finite and within float16's range."""
    low, high = torch.aminmax(weight)
    return bool(low >= -FLOAT16_MAX) and bool(high <= FLOAT16_MAX)


def _packed_linear_shape(x: torch.Tensor, handle: int, out_features: int) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], out_features))


@register_custom_op("packed_linear", mutates=(), fake=_packed_linear_shape)
def packed_linear(x: torch.Tensor, handle: int, out_features: int) -> torch.Tensor:
    """``x @ weight.T + bias``: float32 [..., in_features] to float32 [..., out_features]."""
    return _PACKED[handle].apply(x)
