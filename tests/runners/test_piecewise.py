"""Cutting at split ops: which pieces come out, and whether their sequence computes what the
model computes, also with a split op that makes its own result."""

from __future__ import annotations

import gc
import shutil
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from duograph.kernels.custom_op import function_of, is_split_op, register_custom_op
from duograph.runners.graph import Captured, CaptureError
from duograph.runners.piece_sequence import PieceSequence
from duograph.runners.piecewise import TorchCompileCutter
from duograph.runners.recorded_graph import RecordedGraph, RecordedGraphBackend

# tracing takes a second a test
pytestmark = pytest.mark.slow

WIDTH = 8


@register_custom_op("test_mix_into", mutates=("out",), split_point=True)
def mix_into(x: torch.Tensor, out: torch.Tensor, layer: int) -> None:
    """Stands for attention: writes to a tensor that the piece before made."""
    out.copy_(x.flip(-1) + layer)


@register_custom_op("test_all_reduce", mutates=(), fake=torch.empty_like, split_point=True)
def all_reduce(x: torch.Tensor) -> torch.Tensor:
    """Stands for a collective that returns a new tensor."""
    return x * 3.0


@register_custom_op(
    "test_pair",
    mutates=(),
    fake=lambda x: (torch.empty_like(x), torch.empty_like(x)),
    split_point=True,
)
def pair(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x + 1.0, x - 1.0


class Toy(nn.Module):
    """Embeds and then, per layer, projects, splits, mixes and reduces."""

    def __init__(self, layers: int, *, reduce: bool = False, pairs: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, WIDTH)
        self.projections = nn.ModuleList(nn.Linear(WIDTH, 2 * WIDTH) for _ in range(layers))
        self.reduce = reduce
        self.pairs = pairs
        self.requires_grad_(False)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor = self.embed(input_ids) + positions.unsqueeze(-1)
        for layer, projection in enumerate(self.projections):
            left, right = projection(x).split([WIDTH, WIDTH], dim=-1)
            left.mul_(0.5)
            out = torch.empty_like(left)
            mix_into(left, out, layer)
            x = x + out + right  # right shares memory with left and crosses the split
            if self.reduce:
                x = all_reduce(x)
            if self.pairs:
                up, down = pair(x)
                x = up * down
        return x


class Level:
    """A model cut and captured at some levels, largest first."""

    def __init__(self, model: nn.Module, *levels: int) -> None:
        self.model = model
        self.backend = RecordedGraphBackend()
        self.cutter = TorchCompileCutter("eager")
        self.ids = torch.zeros(max(levels), dtype=torch.int64)
        self.positions = torch.zeros(max(levels), dtype=torch.int64)
        self.cutter.prepare(model, self.ids[:5].clone(), self.positions[:5].clone())
        self.sequences: dict[int, PieceSequence] = {}
        for level in sorted(levels, reverse=True):
            self.sequences[level] = self.cutter.capture(
                self.backend, self.ids[:level], self.positions[:level], 0
            )
            gc.collect()
        self.cutter.seal()

    def check(self, level: int) -> None:
        for seed in range(3):
            generator = torch.Generator().manual_seed(seed)
            self.ids.copy_(torch.randint(0, 50, self.ids.shape, generator=generator))
            self.positions.copy_(torch.randint(0, 9, self.ids.shape, generator=generator))
            with torch.no_grad():
                self.sequences[level].replay()
                expected = self.model(self.ids[:level], self.positions[:level])
            assert torch.equal(self.sequences[level].output, expected)


def test_pieces_lie_between_split_ops() -> None:
    cut = Level(Toy(3), 8)
    assert len(cut.sequences[8].pieces) == 4
    assert len(cut.sequences[8].steps) == 7  # and three split ops
    cut.check(8)


class WarmUps(RecordedGraphBackend):
    """Notes how often each capture is warmed up."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[int] = []

    def capture(
        self, function: Captured, *, warmups: int = 0
    ) -> tuple[RecordedGraph, tuple[torch.Tensor, ...]]:
        self.asked.append(warmups)
        return super().capture(function, warmups=warmups)


def test_like_layers_are_warmed_up_once_a_level() -> None:
    model = Toy(4)
    cut = Level(model, 8)
    for layer, changed in ((None, [1, 1, 0, 0, 1]), (2, [1, 1, 1, 0, 1])):
        backend = WarmUps()
        if layer is not None:  # its projection's weight is laid out in another way
            weight = model.get_parameter(f"projections.{layer}.weight")
            weight.data = weight.data.t().contiguous().t()
        cut.cutter.capture(backend, cut.ids[:8], cut.positions[:8], 1)
        assert backend.asked == changed


def test_what_comes_before_the_first_split_op_can_run_ahead() -> None:
    cut = Level(Toy(2), 8)
    sequence = cut.sequences[8]
    assert sequence.head == 1
    cut.check(8)
    expected = sequence.output.clone()
    sequence.output.zero_()
    with torch.no_grad():
        sequence.start()
        assert not torch.equal(sequence.output, expected)
        sequence.finish()
    assert torch.equal(sequence.output, expected)


class OpNames(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_program_calls_the_function_of_a_split_op_without_the_dispatcher() -> None:
    cut = Level(Toy(2, reduce=True), 8)
    with torch.no_grad(), OpNames() as ops:
        cut.sequences[8].replay()
    assert ops.names and not any("duograph" in name for name in ops.names)
    other = torch.ops.aten.add.Tensor
    assert function_of(other) is other
    assert function_of(torch.ops.duograph.test_mix_into.default) is not mix_into


def test_one_trace_serves_every_level_in_any_order() -> None:
    cut = Level(Toy(2), 16, 3, 8)
    for level in (3, 16, 8, 16, 3):
        cut.check(level)
    assert cut.cutter.recompiles == 0


def test_a_second_registered_split_op_cuts_too() -> None:
    ops = torch.ops.duograph
    assert is_split_op(ops.test_mix_into) and is_split_op(ops.test_all_reduce.default)
    cut = Level(Toy(2, reduce=True), 8, 4)
    # the last reduce is the end: nothing follows it
    assert len(cut.sequences[8].pieces) == 4
    cut.check(4)
    cut.check(8)


def test_the_result_of_a_split_op_is_kept_where_the_next_piece_reads_it() -> None:
    cut = Level(Toy(2, reduce=True), 8)
    keep = [torch.empty(8, WIDTH) for _ in range(50)]  # no luck with the allocator
    cut.check(8)
    assert len(keep) == 50


def test_a_split_op_may_return_several_tensors() -> None:
    cut = Level(Toy(2, pairs=True), 8, 5)
    cut.check(8)
    cut.check(5)


def test_intermediates_share_memory_as_in_an_eager_run() -> None:
    few, many = Level(Toy(2), 64), Level(Toy(12), 64)
    assert many.backend.pool_bytes() < 2 * few.backend.pool_bytes()


def test_a_smaller_level_takes_no_memory_of_its_own() -> None:
    one, three = Level(Toy(3), 64), Level(Toy(3), 64, 32, 8)
    # but for its result, which is never dropped
    extra = three.backend.pool_bytes() - one.backend.pool_bytes()
    assert extra <= 2 * 64 * WIDTH * 4


class Watching(RecordedGraphBackend):
    """Remembers what pieces return."""

    def __init__(self) -> None:
        super().__init__()
        self.results: list[weakref.ref[torch.Tensor]] = []

    def capture(
        self, function: Captured, *, warmups: int = 0
    ) -> tuple[RecordedGraph, tuple[torch.Tensor, ...]]:
        def watched() -> Sequence[torch.Tensor]:
            results = function()
            self.results += map(weakref.ref, results)
            return results

        return super().capture(watched, warmups=warmups)


def test_nothing_keeps_what_a_piece_has_returned_at_capture() -> None:
    """On CUDA such a tensor is graph memory that no later piece can have."""
    model, ids = Toy(3), torch.zeros(8, dtype=torch.int64)
    cutter, backend = TorchCompileCutter("eager"), Watching()
    cutter.prepare(model, ids[:5], ids[:5].clone())
    sequence = cutter.capture(backend, ids, ids.clone(), 1)
    gc.collect()
    assert len(backend.results) > len(sequence.pieces)
    assert [ref() for ref in backend.results if ref() is not None] == []


class NoCapture:
    """Runs pieces as they are compiled: Inductor's code cannot be recorded."""

    name = "none"
    keeps_tensors = False

    def capture(
        self, function: Captured, *, warmups: int = 0
    ) -> tuple[NoGraph, tuple[torch.Tensor, ...]]:
        return NoGraph(), tuple(function())

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def pool_bytes(self) -> int:
        return 0


class NoGraph:
    seconds = 0.0
    nbytes = 0

    def replay(self) -> None:
        raise AssertionError("not captured")


RESULTS: list[weakref.ref[torch.Tensor]] = []
ALIVE: list[int] = []


@register_custom_op("test_count_results_alive", mutates=("x",))
def count_results_alive(x: torch.Tensor) -> None:
    ALIVE.append(sum(ref() is not None for ref in RESULTS))


class OnlyAddresses(NoCapture):
    """As CUDA graphs, which hold no tensor; results go to ``RESULTS``."""

    def capture(
        self, function: Captured, *, warmups: int = 0
    ) -> tuple[NoGraph, tuple[torch.Tensor, ...]]:
        for _ in range(warmups):
            function()
        outputs = tuple(function())
        RESULTS.extend(map(weakref.ref, outputs))
        return NoGraph(), outputs

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()


class ReadsInTurn(nn.Module):
    """Its second piece reads ``out``, then ``kept``."""

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        kept = input_ids * 1.5
        out = torch.empty_like(kept)
        mix_into(kept, out, 0)
        y = out.view(-1) * 2.0
        count_results_alive(y)
        z = y + kept
        count_results_alive(z)
        return z


@pytest.mark.parametrize("warmups", [0, 2])
def test_an_input_is_free_after_its_last_read_in_the_captured_call(warmups: int) -> None:
    RESULTS.clear()
    ids = torch.arange(8)
    cutter = TorchCompileCutter("eager")
    cutter.prepare(ReadsInTurn(), ids[:5], ids[:5].clone())
    ALIVE.clear()
    cutter.capture(OnlyAddresses(), ids, ids.clone(), warmups)
    # both live through the warm-ups, which would find them gone the second time
    assert ALIVE == [2, 2] * warmups + [1, 0]


@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a compiler on the CPU")
def test_inductor_compiles_each_piece_once_for_every_number_of_tokens() -> None:
    model = Toy(2, reduce=True, pairs=True)
    cutter = TorchCompileCutter("inductor")
    cutter.prepare(model, torch.arange(5), torch.arange(5))
    cutter.seal()
    for tokens in (8, 3, 16):
        ids, positions = torch.arange(tokens), torch.arange(tokens) % 5
        pieces = cutter.capture(NoCapture(), ids, positions, 0)
        with torch.no_grad():
            torch.testing.assert_close(pieces.output, model(ids, positions))
    assert cutter.recompiles == 0


class ReadsAValue(Toy):
    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = super().forward(input_ids, positions)
        return x * positions.max().item()  # the host read


class Branches(Toy):
    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = super().forward(input_ids, positions)
        return x if positions.sum() > 0 else -x


def test_a_value_read_on_the_host_is_refused_with_the_line_of_the_model() -> None:
    with pytest.raises(CaptureError, match=r"Tensor.item cannot be in a graph") as error:
        Level(ReadsAValue(1), 8)
    assert __file__ in str(error.value) and "# the host read" in str(error.value)


def test_a_branch_on_data_is_refused() -> None:
    with pytest.raises(CaptureError, match="cannot trace the prefill forward"):
        Level(Branches(1), 8)
