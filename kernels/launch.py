"""Launches of one Triton kernel that cost little Python once a variant is compiled.

``kernel[grid](...)`` works out at every call, argument by argument, which compiled variant fits:
25 to 40 us for 25 arguments on an H200's host, more than many a kernel takes to run. It returns
that variant, and launching the variant itself takes 5 to 8. So a ``Launcher`` keeps the variants
under keys that its caller makes. Written for the CUDA backend; AMD's tells more variants apart.
Knows no kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch

_ALIGNMENT = 16  # bytes: the one alignment of a pointer that Triton tells apart


class Launcher:
    """Launches one ``triton.jit`` function, eagerly or into a stream capture.

    Not for code that torch.compile traces: there the kernel itself has to be called. Hooks added
    to the kernel with ``add_pre_run_hook`` see the first launch of a variant only.
    """

    def __init__(
        self, kernel: Any, *, current_device: Callable[[], int] = torch.cuda.current_device
    ) -> None:
        """``current_device``: index of the device that Triton launches on."""
        self._kernel = kernel
        self._current_device = current_device
        # By device too: Triton loads a variant on the current one, wherever the tensors are.
        self._variants: dict[Hashable, dict[int, Any]] = {}

    def __call__(
        self,
        grid: tuple[int, int, int],
        args: tuple[Any, ...],
        *,
        key: Hashable,
        aligned: tuple[torch.Tensor, ...],
        **options: Any,
    ) -> None:
        """Launches as ``kernel[grid](*args, **options)`` does, the first time by just that, so
        that the variant is compiled and Triton's listener hears of it.

        Args:
            args: all of the kernel's arguments in the order of its signature, constexprs
                included.
            key: all that can differ between two calls and that Triton compiles into a variant:
                dtypes of tensors, constexprs, ``options``, and the integers that are not under
                ``do_not_specialize``. The device need not be in it. Integers that are under it
                fit 32 bits.
            aligned: the tensors among ``args`` whose alignment Triton specialises on. A call in
                which one is misaligned goes Triton's own way.
            options: Triton's, such as ``num_warps``.

        Raises:
            ValueError: at a first launch, ``aligned`` lacks a tensor.
        """
        for tensor in aligned:
            if tensor.data_ptr() % _ALIGNMENT:
                self._kernel[grid](*args, **options)
                return
        by_device = self._variants.get(key)
        if by_device is not None:
            variant = by_device.get(self._current_device())
            if variant is not None:
                variant[grid](*args)
                return
        variant = self._kernel[grid](*args, **options)
        if variant is not None:  # Triton's interpreter compiles nothing
            self._check_aligned(args, aligned)
            self._variants.setdefault(key, {})[self._current_device()] = variant

    def _check_aligned(self, args: tuple[Any, ...], aligned: tuple[torch.Tensor, ...]) -> None:
        named = {id(tensor) for tensor in aligned}
        for param, arg in zip(self._kernel.params, args, strict=True):
            free = param.do_not_specialize or param.do_not_specialize_on_alignment
            if isinstance(arg, torch.Tensor) and not free and id(arg) not in named:
                raise ValueError(f"Triton specialises on the alignment of {param.name}")
