"""Which launches go through Triton's own path and which directly, with a stand-in for its
kernels. That both do the same is tests/gpu's. Host tensors say that they are on device -1, so a
driver whose device that is has them for its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from duograph.kernels.attention.base import AttentionMetadata
from duograph.kernels.launch import Driver, Launcher, Variant, _watching

GRID = (3, 1, 2)
HOST, STREAM, FUNCTION, METADATA = -1, 77, 1234, (4, 1, 0)


@dataclass
class Param:
    name: str
    do_not_specialize: bool = False
    do_not_specialize_on_alignment: bool = False


@dataclass
class Compiled:
    """As Triton's CompiledKernel: launches, and finds nothing out.

    Attributes:
        direct: grid and arguments of launches by ``run``.
        watched: of those by Triton's own way to launch a variant.
        log: ``direct`` of all variants, in the order of the launches.
    """

    log: list[tuple[Any, ...]] = field(default_factory=list)
    direct: list[tuple[Any, ...]] = field(default_factory=list)
    watched: list[tuple[Any, ...]] = field(default_factory=list)
    function: int = FUNCTION
    packed_metadata: tuple[int, ...] = METADATA

    def run(self, x: int, y: int, z: int, stream: int, *args: Any) -> None:
        assert (stream, *args[:5]) == (STREAM, FUNCTION, METADATA, None, None, None)
        self.direct.append(((x, y, z), *args[5:]))
        self.log.append(self.direct[-1])

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args: self.watched.append((grid, *args))


@dataclass
class Kernel:
    """As Triton's JITFunction, if not told otherwise with parameters x, table and count.

    Attributes:
        slow: grid and arguments of launches by the kernel itself.
        direct: of direct launches.
    """

    interpreted: bool = False
    variants: list[Compiled] = field(default_factory=list)
    options: list[dict[str, Any]] = field(default_factory=list)
    slow: list[tuple[Any, ...]] = field(default_factory=list)
    direct: list[tuple[Any, ...]] = field(default_factory=list)
    params: tuple[Param, ...] = (
        Param("x"),
        Param("table", do_not_specialize_on_alignment=True),
        Param("count", do_not_specialize=True),
    )

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Compiled | None]:
        def launch(*args: Any, **options: Any) -> Compiled | None:
            self.options.append(options)
            self.slow.append((grid, *args))
            if self.interpreted:
                return None
            self.variants.append(Compiled(self.direct))
            return self.variants[-1]

        return launch


def driver(device: Callable[[], int] = lambda: 0, *, watched: bool = False) -> Driver:
    return Driver(device=device, stream=lambda index: STREAM, watched=lambda: watched)


def launcher(kernel: Kernel) -> Launcher:
    return Launcher(kernel, driver())


def addresses(launch: tuple[Any, ...]) -> tuple[Any, ...]:
    """A launch as it looks with addresses in place of tensors."""
    return tuple(arg.data_ptr() if isinstance(arg, torch.Tensor) else arg for arg in launch)


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
    launch = Launcher(kernel, driver(lambda: device[0]))
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


def test_tensors_on_the_device_go_by_address_and_others_as_they_are() -> None:
    kernel, x, table = Kernel(), torch.zeros(8), torch.zeros(8)
    launch = Launcher(kernel, driver(lambda: HOST))
    for _ in range(2):
        launch(GRID, (x, table, 1), key="a", aligned=(x,))
    assert kernel.direct == [(GRID, x.data_ptr(), table.data_ptr(), 1)]
    # Triton's own launcher asks the driver about a tensor, so pageable memory is refused.
    kernel = Kernel()
    launch = Launcher(kernel, driver(lambda: 0))
    for _ in range(2):
        launch(GRID, (x, table, 1), key="a", aligned=(x,))
    (direct,) = kernel.direct
    assert direct[1] is x and direct[2] is table


def test_a_variant_is_not_launched_on_another_device_than_its_own() -> None:
    device, compiled = [0], Compiled()
    variant = Variant(compiled, driver(lambda: device[0]))
    assert variant.launch(GRID, (1, 2))
    device[0] = 1
    assert not variant.launch(GRID, (3, 4))
    assert variant.device == 0 and compiled.direct == [(GRID, 1, 2)]


def test_kept_is_what_the_current_device_has() -> None:
    kernel, x, device = Kernel(), torch.zeros(8), [0]
    launch = Launcher(kernel, driver(lambda: device[0]))
    assert launch.kept("a") is None
    launch(GRID, (x, x, 1), key="a", aligned=(x,))
    variant = launch.kept("a")
    assert variant is not None and variant.device == 0
    device[0] = 1
    assert launch.kept("a") is None and launch.kept("b") is None


def test_launches_that_are_watched_go_the_way_that_calls_the_hooks() -> None:
    kernel, x = Kernel(), torch.zeros(8)
    launch = Launcher(kernel, driver(watched=True))
    for _ in range(2):
        launch(GRID, (x, x, 1), key="a", aligned=(x,))
    assert len(kernel.slow) == 1 and not kernel.direct
    assert kernel.variants[0].watched == [(GRID, x, x, 1)]


@pytest.mark.parametrize("name", ["launch_enter_hook", "launch_exit_hook"])
def test_hooks_are_seen_whenever_they_come_and_go(name: str) -> None:
    calls: dict[str, list[Any]] = {"launch_enter_hook": [], "launch_exit_hook": []}
    chains = {hook: SimpleNamespace(calls=listed) for hook, listed in calls.items()}
    runtime = SimpleNamespace(**chains)
    watched = _watching(runtime)
    assert not watched()
    calls[name].append(print)
    assert watched()
    calls[name].clear()
    assert not watched()
    setattr(runtime, name, print)
    assert watched()


@pytest.mark.parametrize("name", ["launch_enter_hook", "launch_exit_hook"])
def test_hooks_of_older_versions_are_seen(name: str) -> None:
    runtime = SimpleNamespace(launch_enter_hook=None, launch_exit_hook=None)
    watched = _watching(runtime)
    assert not watched()
    setattr(runtime, name, print)
    assert watched() and _watching(runtime)()


TABLES = ("page_table", "req_rows", "seq_lens", "query_start_loc")
EXTEND_PARAMS = (
    *map(Param, ("q", "k_cache", "v_cache")),
    *[Param(name, do_not_specialize_on_alignment=True) for name in TABLES],
    Param("out"),
    *[Param(f"scalar {i}") for i in range(17)],
)


Pool = tuple[torch.Tensor, torch.Tensor]
TRITON, LOOKED, STEP = "by Triton", "directly, after a look", "directly, as the layer before"


class ExtendCalls:
    """A backend with a stand-in for its kernel, and one that never launches directly."""

    def __init__(self) -> None:
        pytest.importorskip("triton")
        self.device = HOST
        self.kernel = Kernel(params=EXTEND_PARAMS)
        self._plain = Kernel(interpreted=True)
        self._backends = [self._backend(self.kernel), self._backend(self._plain)]
        self._looks = 0
        look = self._backends[0]._extend.first

        def counted(*args: Any) -> None:
            self._looks += 1
            look(*args)

        self._backends[0]._extend.first = counted

    def _backend(self, kernel: Kernel) -> Any:
        from duograph.kernels.attention.triton import TritonBackend
        from duograph.kernels.attention.triton_extend_launch import ExtendLauncher

        backend = TritonBackend(
            num_q_heads=4, num_kv_heads=2, head_dim=64, device=torch.device("cpu")
        )
        launcher = Launcher(kernel, driver(lambda: self.device))
        backend._extend = ExtendLauncher(num_kv_heads=2, group=2, head_dim=64, launcher=launcher)
        return backend

    def prepare(self, meta: AttentionMetadata) -> None:
        for backend in self._backends:
            backend.prepare(meta)

    def extend(
        self,
        q: torch.Tensor,
        pool: Pool,
        meta: AttentionMetadata,
        scale: float = 0.125,
        out: torch.Tensor | None = None,
    ) -> str:
        """How it was launched; it has what the other backend launches."""
        slow, direct, looks = len(self.kernel.slow), len(self.kernel.direct), self._looks
        out = torch.empty_like(q) if out is None else out
        for backend in self._backends:
            backend.extend(q, *pool, meta, out, scale)
        wanted = addresses(self._plain.slow[-1])
        if len(self.kernel.slow) > slow:
            assert addresses(self.kernel.slow[-1]) == wanted
            return TRITON
        assert len(self.kernel.direct) == direct + 1
        assert addresses(self.kernel.direct[-1]) == wanted
        return LOOKED if self._looks > looks else STEP


def make_pool(heads: int = 2, offset: int = 0) -> Pool:
    """Of two heads in rows of ``heads``; with an offset of elements, misaligned."""
    k, v = (torch.zeros(32 * heads * 64 + offset)[offset:].view(32, heads, 64) for _ in range(2))
    return k[:, :2], v[:, :2]


def extend_meta(tokens: int = 8) -> AttentionMetadata:
    return AttentionMetadata(
        page_table=torch.zeros(4, 16, dtype=torch.int32),
        req_pool_indices=torch.ones(1, dtype=torch.int64),
        seq_lens=torch.full((1,), tokens, dtype=torch.int32),
        out_cache_loc=torch.arange(tokens),
        page_size=16,
        query_start_loc=torch.tensor([0, tokens], dtype=torch.int32),
        max_extend_len=tokens,
        num_real_tokens=tokens,
    )


def test_layers_of_a_prepared_step_need_no_look() -> None:
    calls, metas = ExtendCalls(), [extend_meta(), extend_meta(), extend_meta(5)]
    pools = [make_pool() for _ in range(3)]
    found = []
    for meta in metas:
        calls.prepare(meta)
        tokens = len(meta.out_cache_loc)
        found.append([calls.extend(torch.zeros(tokens, 4, 64), pool, meta) for pool in pools])
    assert found == [[TRITON, STEP, STEP], [LOOKED, STEP, STEP], [LOOKED, STEP, STEP]]


def test_what_was_not_prepared_is_looked_at_every_time() -> None:
    calls, meta, pool, q = ExtendCalls(), extend_meta(), make_pool(), torch.zeros(8, 4, 64)
    assert [calls.extend(q, pool, meta) for _ in range(3)] == [TRITON, LOOKED, LOOKED]
    meta.seq_lens, meta.num_real_tokens = meta.seq_lens.clone(), 7
    assert calls.extend(q, pool, meta) == LOOKED
    for real in (6, 5):
        meta.seq_lens, meta.num_real_tokens = meta.seq_lens.clone(), real
        calls.prepare(meta)
        assert [calls.extend(q, pool, meta) for _ in range(2)] == [LOOKED, STEP]
    assert calls.extend(q, pool, extend_meta()) == LOOKED
    assert calls.extend(q, pool, meta) == STEP


def test_layers_unlike_the_one_before_are_looked_at() -> None:
    calls, meta, pool, q = ExtendCalls(), extend_meta(), make_pool(), torch.zeros(8, 4, 64)
    calls.prepare(meta)

    def twice(q: torch.Tensor, pool: Pool, scale: float = 0.125) -> list[str]:
        return [calls.extend(q, pool, meta, scale) for _ in range(2)]

    assert twice(q, pool) == [TRITON, STEP]
    assert twice(q, pool, 0.25) == twice(q, pool) == [LOOKED, STEP]
    wide, far = torch.zeros(8, 6, 64)[:, :4], make_pool(heads=3)
    assert twice(wide, pool) == [TRITON, STEP] and twice(q, pool) == [LOOKED, STEP]
    assert twice(q, far) == [TRITON, STEP] and twice(q, pool) == [LOOKED, STEP]
    out = torch.zeros(8, 6, 64)[:, :4]
    assert [calls.extend(q, pool, meta, out=out) for _ in range(2)] == [TRITON, STEP]
    assert twice(q, pool) == [LOOKED, STEP]
    assert twice(q.bfloat16(), pool) == [TRITON, STEP] and twice(q, pool) == [LOOKED, STEP]
    for odd_q, odd_pool in (
        (torch.zeros(q.numel() + 1)[1:].view(q.shape), pool),
        (q, make_pool(offset=1)),
    ):
        assert twice(odd_q, odd_pool) == [TRITON, TRITON] and calls.extend(q, pool, meta) == STEP
    with pytest.raises(ValueError, match="q and out"):
        calls.extend(torch.zeros(8, 4, 32), pool, meta)


def test_a_step_is_for_the_device_of_its_tensors() -> None:
    calls, meta, pool, q = ExtendCalls(), extend_meta(), make_pool(), torch.zeros(8, 4, 64)
    calls.prepare(meta)
    assert [calls.extend(q, pool, meta) for _ in range(2)] == [TRITON, STEP]
    calls.device = 0  # now nothing lies on the current device
    assert [calls.extend(q, pool, meta) for _ in range(3)] == [TRITON, LOOKED, LOOKED]
    assert all(isinstance(launch[1], torch.Tensor) for launch in calls.kernel.direct[-2:])
    calls.device = HOST
    assert calls.extend(q, pool, meta) == STEP


def tensors(**names: bool) -> tuple[Param, ...]:
    """Parameters; True are those that Triton takes to be aligned."""
    known = [Param(name, do_not_specialize_on_alignment=not on) for name, on in names.items()]
    return (*known, *[Param(f"scalar {i}") for i in range(12)])


def test_a_linear_layer_launches_directly_what_it_launched_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("triton")
    from duograph.kernels import gemv_triton

    names = dict.fromkeys(("x", "weight", "norm_weight", "residual", "out"), True)
    kernel = Kernel(params=tensors(**names)[: 5 + 11])
    device = [HOST]
    made = Launcher(kernel, driver(lambda: device[0]))
    monkeypatch.setattr(gemv_triton, "_launch_gemv", made)
    x, weight = torch.zeros(1, 64), torch.zeros(40, 64)
    for eps in (1e-5, 1e-6):
        out = gemv_triton.fused_gemv(x, weight, norm_weight=x[0], eps=eps)
        assert out.shape == (1, 40)
    (slow,), (direct,) = kernel.slow, kernel.direct
    assert addresses(slow)[1:5] == direct[1:5] and slow[7:] == direct[7:]
    assert direct[5:7] == (out.data_ptr(), 1e-6)
    odd = torch.zeros(65)[1:].view(1, 64)
    for _ in range(2):
        gemv_triton.fused_gemv(odd, weight, norm_weight=x[0])
        with pytest.raises(ValueError, match="contiguous"):
            gemv_triton.fused_gemv(x, weight.T.contiguous().T, norm_weight=x[0])
    assert len(kernel.slow) == 3
    device[0] = 0
    for _ in range(3):
        gemv_triton.fused_gemv(x, weight, norm_weight=x[0])
    assert len(kernel.slow) == 4
    assert kernel.direct[-1][1] is x  # on no device of the driver's
