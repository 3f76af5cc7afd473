"""Which launches go through Triton's own path and which directly, with a stand-in for its
kernels. That both do the same is tests/gpu's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from duograph.kernels.launch import Launcher

GRID = (3, 1, 2)


@dataclass
class Param:
    name: str
    do_not_specialize: bool = False
    do_not_specialize_on_alignment: bool = False


@dataclass
class Variant:
    """As Triton's CompiledKernel: launches, and finds nothing out."""

    direct: list[tuple[Any, ...]] = field(default_factory=list)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args: self.direct.append((grid, *args))


@dataclass
class Kernel:
    """As Triton's JITFunction, with parameters x, table and count."""

    interpreted: bool = False
    variants: list[Variant] = field(default_factory=list)
    options: list[dict[str, Any]] = field(default_factory=list)
    params: tuple[Param, ...] = (
        Param("x"),
        Param("table", do_not_specialize_on_alignment=True),
        Param("count", do_not_specialize=True),
    )

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Variant | None]:
        def launch(*args: Any, **options: Any) -> Variant | None:
            self.options.append(options)
            if self.interpreted:
                return None
            self.variants.append(Variant())
            return self.variants[-1]

        return launch

    @property
    def direct(self) -> list[tuple[Any, ...]]:
        return [launch for variant in self.variants for launch in variant.direct]


def launcher(kernel: Kernel) -> Launcher:
    return Launcher(kernel, current_device=lambda: 0)


def test_first_launch_of_a_key_is_tritons_and_the_rest_are_direct() -> None:
    kernel, x, table = Kernel(), torch.zeros(8), torch.zeros(8)
    launch = launcher(kernel)
    for count in (1, 2, 3):
        launch(GRID, (x, table, count), key="a", aligned=(x,), num_warps=4)
    assert kernel.options == [{"num_warps": 4}]
    assert kernel.direct == [(GRID, x, table, 2), (GRID, x, table, 3)]
    launch(GRID, (x, table, 4), key="b", aligned=(x,), num_warps=8)
    assert kernel.options == [{"num_warps": 4}, {"num_warps": 8}]
    launch(GRID, (x, table, 5), key="a", aligned=(x,), num_warps=4)
    launch(GRID, (x, table, 6), key="b", aligned=(x,), num_warps=8)
    assert [launch[-1] for launch in kernel.variants[0].direct] == [2, 3, 5]
    assert [launch[-1] for launch in kernel.variants[1].direct] == [6]


def test_misaligned_tensors_always_go_tritons_way_and_leave_nothing_behind() -> None:
    kernel, x = Kernel(), torch.zeros(8)
    launch = launcher(kernel)
    odd = x[1:]
    for _ in range(2):
        launch(GRID, (odd, x, 1), key="a", aligned=(odd,))
    assert len(kernel.variants) == 2 and not kernel.direct
    for _ in range(2):
        launch(GRID, (x, odd, 1), key="a", aligned=(x,))  # the table may lie anywhere
    launch(GRID, (odd, x, 1), key="a", aligned=(odd,))
    assert len(kernel.variants) == 4
    assert kernel.direct == [(GRID, x, odd, 1)]


def test_every_device_has_variants_of_its_own() -> None:
    kernel, x, device = Kernel(), torch.zeros(8), [0]
    launch = Launcher(kernel, current_device=lambda: device[0])
    for device[0] in (0, 1, 0, 1):
        launch(GRID, (x, x, 1), key="a", aligned=(x,))
    assert [len(variant.direct) for variant in kernel.variants] == [1, 1]


def test_nothing_is_kept_under_tritons_interpreter() -> None:
    kernel, x = Kernel(interpreted=True), torch.zeros(8)
    launch = launcher(kernel)
    for _ in range(3):
        launch(GRID, (x, x, 1), key="a", aligned=(x,))
    assert len(kernel.options) == 3


def test_a_specialised_tensor_cannot_be_forgotten() -> None:
    x, other = torch.zeros(8), torch.zeros(8)
    launch = launcher(Kernel())
    with pytest.raises(ValueError, match="alignment of x"):
        launch(GRID, (x, other, 1), key="a", aligned=(other,))
