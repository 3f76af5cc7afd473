"""Direct launches: every one must be of the variant that Triton itself would have taken."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from duograph.kernels import sampling
from duograph.tests.attention_cases import Problem, assert_close, make_problem

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@dataclass
class Address:
    """A tensor as far as Triton looks at it."""

    address: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        return self.address


@dataclass
class CheckedKernel:
    """A ``triton.jit`` function whose direct launches ask Triton too, and launch twice.

    Attributes:
        slow, direct: launches so far.
        chosen: variants by identity, of all slow launches.
        known: tensors that a caller passes, by address: their own dtypes are asked about. Of
            other addresses it is the dtype of the tensor that was there in the slow launch.
    """

    kernel: Any
    slow: int = 0
    direct: int = 0
    chosen: set[int] = field(default_factory=set)
    known: dict[int, torch.Tensor] = field(default_factory=dict)

    @property
    def params(self) -> Any:
        return self.kernel.params

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., CheckedVariant]:
        def launch(*args: Any, **options: Any) -> CheckedVariant:
            self.slow += 1
            compiled = self.kernel[grid](*args, **options)
            self.chosen.add(id(compiled))
            tensors = {i: arg for i, arg in enumerate(args) if isinstance(arg, torch.Tensor)}
            dtypes = {place: tensor.dtype for place, tensor in tensors.items()}
            return CheckedVariant(self, compiled, options, dtypes)

        return launch

    def knows(self, *tensors: torch.Tensor | None) -> None:
        """These and no others."""
        self.known = {tensor.data_ptr(): tensor for tensor in tensors if tensor is not None}


@dataclass
class CheckedVariant:
    """``watched`` counts launches by Triton's own way to launch a variant."""

    owner: CheckedKernel
    compiled: Any
    options: dict[str, Any]
    dtypes: dict[int, torch.dtype]
    watched: int = 0

    @property
    def function(self) -> Any:
        return self.compiled.function

    @property
    def packed_metadata(self) -> Any:
        return self.compiled.packed_metadata

    def run(self, x: int, y: int, z: int, *launch: Any) -> None:
        args = launch[6:]  # behind stream, function, metadata and what hooks are told
        self._check((x, y, z), args)
        self.compiled.run(x, y, z, *launch)

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., None]:
        def launch(*args: Any) -> None:
            self.watched += 1
            self._check(grid, args)
            self.compiled[grid](*args)

        return launch

    def _check(self, grid: tuple[int, int, int], args: tuple[Any, ...]) -> None:
        self.owner.direct += 1
        seen = list(args)
        for place, dtype in self.dtypes.items():
            if isinstance(address := args[place], int):
                seen[place] = self.owner.known.get(address, Address(address, dtype))
        assert self.owner.kernel[grid](*seen, **self.options) is self.compiled


def problem(dtype: torch.dtype, page_size: int = 16, seed: int = 0) -> Problem:
    return make_problem(
        seq_lens=[40, 129, 7],
        extend_lens=[40, 64, 1],
        num_q_heads=8,
        num_kv_heads=2,
        head_dim=64,
        page_size=page_size,
        dtype=dtype,
        device="cuda",
        max_pages=64,
        padding_rows=3,
        seed=seed,
    )


def misaligned(tensor: torch.Tensor) -> torch.Tensor:
    """The same values and strides, one element off a multiple of 16 bytes."""
    wide = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device=tensor.device)
    copy = wide[1:].view(tensor.shape)
    copy.copy_(tensor)
    return copy


def test_extend_takes_the_variant_of_each_dtype_stride_page_size_and_alignment() -> None:
    from duograph.kernels.attention.triton import TritonBackend
    from duograph.kernels.attention.triton_extend import extend_kernel
    from duograph.kernels.attention.triton_extend_launch import ExtendLauncher
    from duograph.kernels.launch import Launcher

    backend = TritonBackend(
        num_q_heads=8, num_kv_heads=2, head_dim=64, device=torch.device("cuda", 0)
    )
    kernel = CheckedKernel(extend_kernel)
    backend._extend = ExtendLauncher(
        num_kv_heads=2, group=4, head_dim=64, launcher=Launcher(kernel)
    )

    def run(case: Problem, q: torch.Tensor) -> torch.Tensor:
        out, meta = torch.zeros_like(q), case.meta
        tables = (meta.page_table, meta.req_pool_indices, meta.seq_lens, meta.query_start_loc)
        kernel.knows(q, case.k_cache, case.v_cache, *tables, out)
        backend.extend(q, case.k_cache, case.v_cache, meta, out, case.scale)
        assert_close(out, case)
        return out

    half = problem(torch.bfloat16)
    first = run(half, half.q)
    assert (kernel.slow, kernel.direct) == (1, 0)
    for case in (half, problem(torch.bfloat16, seed=1)):
        again = run(case, case.q)
    assert (kernel.slow, kernel.direct) == (1, 2)
    assert torch.equal(run(half, half.q), first) and not torch.equal(again, first)
    run(half, half.q.contiguous())
    assert kernel.slow == 2
    for _ in range(2):
        run(half, misaligned(half.q))
    assert kernel.slow == 4
    for dtype, page_size in ((torch.float16, 16), (torch.float32, 16), (torch.bfloat16, 6)):
        other = problem(dtype, page_size)
        for _ in range(3):
            run(other, other.q)
    assert kernel.slow == 7
    run(half, half.q)
    assert (kernel.slow, kernel.direct) == (7, 10)
    # The keys are finer than Triton's: another stride may need no other variant.
    assert len(kernel.chosen) == 5


def test_layers_of_a_prepared_step_take_the_same_variant() -> None:
    from duograph.kernels.attention.triton import TritonBackend
    from duograph.kernels.attention.triton_extend import extend_kernel
    from duograph.kernels.attention.triton_extend_launch import ExtendLauncher
    from duograph.kernels.launch import Launcher

    backend = TritonBackend(
        num_q_heads=8, num_kv_heads=2, head_dim=64, device=torch.device("cuda", 0)
    )
    kernel = CheckedKernel(extend_kernel)
    backend._extend = ExtendLauncher(
        num_kv_heads=2, group=4, head_dim=64, launcher=Launcher(kernel)
    )

    def run(case: Problem, q: torch.Tensor) -> int:
        """Two layers: of how many were the strides and dtypes of all looked at?"""
        meta, looks, look = case.meta, 0, backend._extend.first
        tables = (meta.page_table, meta.req_pool_indices, meta.seq_lens, meta.query_start_loc)

        def counted(*args: Any) -> None:
            nonlocal looks
            looks += 1
            look(*args)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(backend._extend, "first", counted)
            backend.prepare(meta)
            for _ in range(2):
                out = torch.zeros_like(q)
                kernel.knows(q, case.k_cache, case.v_cache, *tables, out)
                backend.extend(q, case.k_cache, case.v_cache, meta, out, case.scale)
                assert_close(out, case)
        return looks

    for dtype in (torch.bfloat16, torch.float32):
        cases = problem(dtype), problem(dtype, seed=1), problem(dtype, page_size=6)
        for case in (*cases, *cases):
            assert run(case, case.q) == 1
            assert run(case, case.q.contiguous()) == 1
            assert run(case, misaligned(case.q)) == 2
    # Of each dtype: first launches of two page sizes and two strides, and 12 misaligned ones.
    assert (kernel.slow, kernel.direct) == (2 * (4 + 12), 2 * (24 - 4))


@pytest.mark.parametrize("name", ["launch_enter_hook", "launch_exit_hook"])
def test_a_profiler_that_comes_and_goes_sees_every_launch(name: str) -> None:
    from triton import knobs

    from duograph.kernels import gemv_triton

    x, weight = (torch.randn(n, 1024, device="cuda").bfloat16() for n in (1, 64))
    wanted, seen = gemv_triton.fused_gemv(x, weight), []
    hook = getattr(knobs.runtime, name)

    def see(metadata: Any) -> None:
        seen.append(metadata.get()["name"])

    for _ in range(2):
        hook.add(see)
        try:
            for _ in range(3):
                assert torch.equal(gemv_triton.fused_gemv(x, weight), wanted)
        finally:
            hook.remove(see)
        assert torch.equal(gemv_triton.fused_gemv(x, weight), wanted)
    assert seen == ["_gemv_kernel"] * 6


def test_host_tensors_are_for_triton_to_look_at_every_time() -> None:
    n = 3
    logits = torch.randn(n, 5000, device="cuda")
    columns = {name: torch.ones(n, device="cuda") for name in ("temperature", "top_p", "min_p")}
    top_k, seed = torch.full((n,), -1, device="cuda"), torch.arange(n, device="cuda")

    def run(position: torch.Tensor) -> torch.Tensor:
        return sampling.sample(
            logits, **columns, top_k=top_k, seed=seed, position=position, filtered=False
        )

    position = torch.arange(n, dtype=torch.int32)
    wanted = run(position.cuda())
    for _ in range(3):
        assert torch.equal(run(position.cuda()), wanted)
        assert torch.equal(run(position.pin_memory()), wanted)
        with pytest.raises(ValueError, match="cannot be accessed"):
            run(position)
    torch.cuda.synchronize()


def test_a_direct_launch_is_captured_like_any_other() -> None:
    from duograph.kernels.attention.triton import TritonBackend

    backend = TritonBackend(
        num_q_heads=8, num_kv_heads=2, head_dim=64, device=torch.device("cuda", 0)
    )
    case = problem(torch.bfloat16)
    out = torch.zeros_like(case.q)
    arguments = (case.q, case.k_cache, case.v_cache, case.meta, out, case.scale)
    backend.prepare(case.meta)
    backend.extend(*arguments)
    wanted = out.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        backend.extend(*arguments)
    out.zero_()
    graph.replay()
    assert torch.equal(out, wanted)


@pytest.mark.parametrize("filtered", [False, True])
def test_sampling(monkeypatch: pytest.MonkeyPatch, filtered: bool) -> None:
    from duograph.kernels import sampling_triton
    from duograph.kernels.launch import Launcher

    draw = CheckedKernel(sampling_triton._draw_kernel)
    pick = CheckedKernel(sampling_triton._pick_kernel)
    monkeypatch.setattr(sampling_triton, "_launch_draw", Launcher(draw))
    monkeypatch.setattr(sampling_triton, "_launch_pick", Launcher(pick))
    n, vocab = 5, 20000
    table = {
        "temperature": torch.linspace(0.0, 1.5, n),
        "top_k": torch.full((n,), 40 if filtered else -1, dtype=torch.int32),
        "top_p": torch.full((n,), 0.9 if filtered else 1.0),
        "min_p": torch.zeros(n),
        "seed": torch.arange(n) * 7919,
    }
    on_gpu = {name: column.cuda() for name, column in table.items()}
    rows, position = torch.arange(n), torch.arange(n, dtype=torch.int32) + 9

    def run(logits: torch.Tensor, *, tables: bool) -> torch.Tensor:
        positions, targets = position.cuda(), torch.zeros(n, dtype=torch.int64, device="cuda")
        table, store = (rows.cuda(), targets) if tables else (None, None)
        for kernel in (draw, pick):
            kernel.knows(logits, *on_gpu.values(), positions, table, store)
        drawn = sampling.sample(
            logits,
            **on_gpu,
            position=positions,
            filtered=filtered,
            rows=table,
            next_tokens=store,
        )
        return drawn.cpu()

    for dtype in (torch.float32, torch.bfloat16):
        logits = (torch.randn(n, vocab, generator=torch.Generator().manual_seed(3)) * 2).to(dtype)
        wanted = sampling.sample(logits.float(), **table, position=position, filtered=filtered)
        drawn = [
            run(given, tables=tables)
            for tables in (False, True)
            for given in (logits.cuda(), logits.cuda(), misaligned(logits.cuda()))
        ]
        wide = torch.zeros(n, vocab + 8, dtype=dtype, device="cuda")[:, :vocab]
        wide.copy_(logits)
        drawn.append(run(wide, tables=True))
        assert all(torch.equal(tokens, drawn[0]) for tokens in drawn)
        assert int((drawn[0] != wanted).sum()) <= 1  # of equal scores but for a rounding
    # Of each dtype: first launches with and without tables and of the other stride, and two
    # that are misaligned.
    assert (draw.slow, draw.direct) == (10, 4)
    assert (pick.slow, pick.direct) == (2, 12)


def test_gemv(monkeypatch: pytest.MonkeyPatch) -> None:
    from duograph.kernels import gemv_triton
    from duograph.kernels.launch import Launcher
    from duograph.kernels.pdl import has_pdl

    kernel = CheckedKernel(gemv_triton._gemv_kernel)
    monkeypatch.setattr(gemv_triton, "_launch_gemv", Launcher(kernel))
    for dtype in (torch.bfloat16, torch.float16):
        weight = torch.randn(1000, 1024, device="cuda").to(dtype)
        x = torch.randn(1, 1024, device="cuda").to(dtype)
        wanted = x.float() @ weight.float().T
        for given in (x, x, misaligned(x)):
            kernel.knows(given, weight)
            for pdl in {False, has_pdl(x.device)}:
                out = gemv_triton.fused_gemv(given, weight, pdl=pdl)
                assert (out.float() - wanted).norm() / wanted.norm() < 1e-2
    modes = len({False, has_pdl(torch.device("cuda", 0))})
    assert (kernel.slow, kernel.direct) == (4 * modes, 2 * modes)
