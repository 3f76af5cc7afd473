"""Launches of one Triton kernel that cost little Python once a variant is compiled.

``kernel[grid](...)`` works out at every call, argument by argument, which compiled variant fits:
25 to 40 us for 25 arguments on an H200's host, more than many a kernel takes to run. It returns
that variant, so a ``Launcher`` keeps it under a key that its caller makes. Launching the variant
by ``variant[grid](...)`` still takes 5 to 8 us: for hooks that nobody has set, and for asking the
driver about every tensor. So what is inside it is called, as torch's Inductor does, with
addresses. Written for the CUDA backend; AMD's tells more variants apart. Knows no kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

ALIGNMENT = 16  # bytes: the one alignment of a pointer that Triton tells apart

Grid = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Driver:
    """What a launch asks of the process, every time.

    Attributes:
        device: the index of the current device, which Triton launches on.
        stream: the handle of a device's current stream.
        watched: whether anyone listens to Triton's launches, as profilers do.
    """

    device: Callable[[], int]
    stream: Callable[[int], int]
    watched: Callable[[], bool]


@cache
def cuda_driver() -> Driver:
    """Torch's own, without the Python around it that sets CUDA up: a launch of Triton's, which
    comes before every direct one, has done that. A build of torch without CUDA lacks them, and
    Triton interprets there, so that nothing is ever launched directly."""
    from triton import knobs

    return Driver(
        device=getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device),
        stream=getattr(
            torch._C,
            "_cuda_getCurrentRawStream",
            lambda index: torch.cuda.current_stream(index).cuda_stream,
        ),
        watched=_watching(knobs.runtime),
    )


def _watching(runtime: Any) -> Callable[[], bool]:
    """``Driver.watched`` of Triton's ``knobs.runtime``. A hook there is a chain, to which calls
    are added, or of older versions None or a function; either may be put in its place."""
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    entering, leaving = _listeners(enter), _listeners(leave)

    def watched() -> bool:
        return bool(
            entering
            or leaving
            or runtime.launch_enter_hook is not enter
            or runtime.launch_exit_hook is not leave
        )

    return watched


def _listeners(hook: Any) -> Sequence[Any]:
    """The very list of a chain, which shows what is added later."""
    if hook is None:
        return ()
    calls: Sequence[Any] = getattr(hook, "calls", (hook,))
    return calls


Layout = tuple[torch.dtype, int, torch.Size, tuple[int, ...]]


def layout(tensor: torch.Tensor) -> Layout:
    """All of a tensor that a launch can depend on but its address: two of one layout need no
    checks of their own and have the same constants. The index of a host tensor's device is -1."""
    return tensor.dtype, tensor.get_device(), tensor.shape, tensor.stride()


class Variant:
    """One compiled kernel on the device that Triton has loaded it on, which it keeps loaded.

    Attributes:
        device: index of that device.
    """

    __slots__ = (
        "_compiled",
        "_driver",
        "_free",
        "_function",
        "_packed_metadata",
        "_run",
        "_specialised",
        "device",
    )

    def __init__(
        self,
        compiled: Any,
        driver: Driver,
        *,
        specialised: tuple[int, ...] = (),
        free: tuple[int, ...] = (),
    ) -> None:
        """``compiled``: Triton's ``CompiledKernel``, launched at least once on the current device.
        ``specialised`` and ``free``: the places of the tensors among its arguments; the former
        are those it takes to be aligned."""
        self._compiled = compiled
        self._driver = driver
        self._specialised = specialised
        self._free = free
        # The module that holds the function is unloaded, if ever, with what is kept above.
        self._function = compiled.function
        self._packed_metadata = compiled.packed_metadata
        self._run = compiled.run
        self.device = driver.device()

    def launch(self, grid: Grid, args: Sequence[Any]) -> bool:
        """Launches on the current stream. False, and nothing has been done, if another device
        than the variant's is the current one.

        Args:
            args: as the kernel takes them, but that a tensor may be given by its ``data_ptr()``.
                That is for tensors on the variant's device alone: an address goes to the kernel
                as it is, where of a tensor the driver is asked, which refuses pageable memory
                and may have another address for page-locked memory. Tensors that Triton
                specialises on must be aligned to ``ALIGNMENT``.
        """
        driver, device = self._driver, self.device
        if driver.device() != device:
            return False
        if driver.watched():
            self._compiled[grid](*args)
        else:
            self._run(
                *grid,
                driver.stream(device),
                self._function,
                self._packed_metadata,
                None,  # what the hooks would be told, and the two of them
                None,
                None,
                *args,
            )
        return True

    def with_addresses(self, args: Sequence[Any]) -> list[Any] | None:
        """``args`` with addresses in place of what lies on the device, to be launched; None if a
        tensor is not aligned as the variant takes it to be."""
        device, given = self.device, list(args)
        bits = 0
        for place in self._specialised:
            tensor = given[place]
            address = tensor.data_ptr()
            bits |= address
            if tensor.get_device() == device:
                given[place] = address
        if bits % ALIGNMENT:
            return None
        for place in self._free:
            tensor = given[place]
            if tensor.get_device() == device:
                given[place] = tensor.data_ptr()
        return given


class Launcher:
    """Launches one ``triton.jit`` function, eagerly or into a stream capture.

    Not for code that torch.compile traces: there the kernel itself has to be called. Hooks added
    to the kernel with ``add_pre_run_hook`` see the first launch of a variant only; those of
    ``triton.knobs.runtime`` see all.
    """

    def __init__(self, kernel: Any, driver: Driver | None = None) -> None:
        self._kernel = kernel
        self._driver = driver or cuda_driver()
        # By device too: Triton loads a variant on the current one, wherever the tensors are.
        self._variants: dict[Hashable, dict[int, Variant]] = {}

    def __call__(
        self,
        grid: Grid,
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
        variant = self.kept(key)
        if variant is not None:
            given = variant.with_addresses(args)
            if given is not None and variant.launch(grid, given):
                return
        compiled = self._kernel[grid](*args, **options)
        if compiled is None:  # Triton's interpreter compiles nothing
            return
        if variant is None and not any(tensor.data_ptr() % ALIGNMENT for tensor in aligned):
            self._keep(key, compiled, args, aligned)

    def kept(self, key: Hashable) -> Variant | None:
        """The variant that calls with ``key`` launch on the current device, once there was one."""
        by_device = self._variants.get(key)
        return None if by_device is None else by_device.get(self._driver.device())

    def _keep(
        self,
        key: Hashable,
        compiled: Any,
        args: tuple[Any, ...],
        aligned: tuple[torch.Tensor, ...],
    ) -> None:
        named = {id(tensor) for tensor in aligned}
        specialised, free = [], []
        for place, (param, arg) in enumerate(zip(self._kernel.params, args, strict=True)):
            if not isinstance(arg, torch.Tensor):
                continue
            if param.do_not_specialize or param.do_not_specialize_on_alignment:
                free.append(place)
            elif id(arg) in named:
                specialised.append(place)
            else:
                raise ValueError(f"Triton specialises on the alignment of {param.name}")
        variant = Variant(compiled, self._driver, specialised=tuple(specialised), free=tuple(free))
        self._variants.setdefault(key, {})[variant.device] = variant
