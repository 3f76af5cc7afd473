"""The recorder: what it replays, what it refuses, and whose memory the results lie in."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from duograph.kernels.custom_op import register_custom_op
from duograph.runners.forward_context import ForwardContext, current, use_context
from duograph.runners.graph import CaptureError
from duograph.runners.recorded_graph import MemoryPool, RecordedGraphBackend

Tensors = tuple[torch.Tensor, ...]
SEEN_CONTEXTS: list[object] = []


@register_custom_op("test_note_and_double", mutates=("x",))
def note_and_double(x: torch.Tensor) -> None:
    SEEN_CONTEXTS.append(current())
    x.tolist()  # an opaque op may read its tensors
    x.mul_(2)


@pytest.fixture
def backend() -> RecordedGraphBackend:
    return RecordedGraphBackend()


@pytest.fixture
def x() -> torch.Tensor:
    return torch.arange(12.0).view(3, 4)


def check_replay(
    backend: RecordedGraphBackend, function: Callable[[], Tensors], static: torch.Tensor
) -> None:
    """After the static input has changed, a replay gives what a call gives, in the same place.
    The static tensor itself is compared too, in case it is written to."""
    graph, outputs = backend.capture(function)
    addresses = [output.data_ptr() for output in outputs]
    for seed in range(3):
        new = torch.randn(static.shape, generator=torch.Generator().manual_seed(seed))
        static.copy_(new)
        expected = [tensor.clone() for tensor in function()]
        written = static.clone()
        static.copy_(new)
        graph.replay()
        for output, wanted in zip(outputs, expected, strict=True):
            assert torch.equal(output, wanted)
        assert torch.equal(static, written)
        assert addresses == [output.data_ptr() for output in outputs]


def test_ops_of_every_shape_are_replayed(backend: RecordedGraphBackend, x: torch.Tensor) -> None:
    weight = torch.randn(4, 6)

    def function() -> Tensors:
        hidden = x @ weight
        left, right = hidden.split([2, 4], dim=-1)
        joined = torch.cat([right, left, x], dim=-1)
        picked = joined[INDEX]
        best, where = joined.topk(2, dim=-1)
        return joined, picked, best, where, torch.where(joined > 0, joined, 0.0)

    check_replay(backend, function, x)


INDEX = torch.tensor([2, 0])


def test_views_of_static_tensors_see_new_values(
    backend: RecordedGraphBackend, x: torch.Tensor
) -> None:
    check_replay(backend, lambda: (x.t()[1:3].unsqueeze(0) + 1, x[0], x.view(-1)[::2]), x)


def test_writes_to_a_static_tensor_through_a_view_are_replayed(
    backend: RecordedGraphBackend, x: torch.Tensor
) -> None:
    def function() -> Tensors:
        x[1].add_(x[0])
        x.view(-1)[2:4].mul_(3)
        x[2, :2] = 5.0
        return (x.sum(0),)

    check_replay(backend, function, x)


def test_writes_to_an_intermediate_reach_its_other_views(
    backend: RecordedGraphBackend, x: torch.Tensor
) -> None:
    def function() -> Tensors:
        hidden = x * 2
        row, column = hidden[1], hidden[:, 1]
        row.add_(100.0)
        column.mul_(-1.0)
        torch.add(row, 1.0, out=row)
        return hidden.clone(), row, column

    check_replay(backend, function, x)


def test_results_that_share_memory_still_do(backend: RecordedGraphBackend, x: torch.Tensor) -> None:
    def function() -> Tensors:
        hidden = x + 1
        q, k = hidden.split([3, 1], dim=-1)
        return q, k, hidden

    graph, (q, k, hidden) = backend.capture(function)
    graph.replay()
    assert q.stride() == (4, 1)  # laid out as in an eager run
    q.zero_()
    assert torch.equal(hidden[:, :3], torch.zeros(3, 3))
    assert torch.equal(hidden[:, 3:], k)


def test_a_result_that_is_a_static_tensor_is_that_tensor(
    backend: RecordedGraphBackend, x: torch.Tensor
) -> None:
    _, outputs = backend.capture(lambda: (x, x[1]))
    assert outputs[0].data_ptr() == x.data_ptr()
    assert outputs[1].data_ptr() == x[1].data_ptr()


def test_python_is_not_called_again_at_replay(
    backend: RecordedGraphBackend, x: torch.Tensor
) -> None:
    calls = []

    def function() -> Tensors:
        calls.append(1)
        return (x * len(calls),)

    graph, outputs = backend.capture(function)
    x.fill_(7.0)
    graph.replay()
    graph.replay()
    assert len(calls) == 1
    assert torch.equal(outputs[0], torch.full((3, 4), 7.0))


def test_a_custom_op_is_one_node(backend: RecordedGraphBackend, x: torch.Tensor) -> None:
    context = FakeContext()
    with use_context(context):
        graph, outputs = backend.capture(lambda: (double_a_copy(x),))
    # clone, the op, and the copy to the fixed address
    assert graph.num_nodes == 3
    x.fill_(3.0)
    SEEN_CONTEXTS.clear()
    with use_context(FakeContext()):
        graph.replay()
    assert torch.equal(outputs[0], torch.full((3, 4), 6.0))
    # as a captured kernel keeps the pointers of its capture
    assert SEEN_CONTEXTS == [context]


class FakeContext(ForwardContext):
    """An opaque op reads nothing of it here."""

    def __init__(self) -> None:
        pass

    __eq__ = object.__eq__
    __hash__ = object.__hash__


def double_a_copy(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    note_and_double(y)
    return y


REFUSED: dict[str, tuple[Callable[[torch.Tensor], object], str, str]] = {
    "item": (lambda x: x.sum().item(), "Tensor.item", "on the host"),
    "bool": (lambda x: x if x.sum() > 0 else -x, "aten._local_scalar_dense", "on the host"),
    "int": (lambda x: x[: int(x[0, 0])], "aten._local_scalar_dense", "on the host"),
    "tolist": (lambda x: x.tolist(), "Tensor.tolist", "on the host"),
    "numpy": (lambda x: x.numpy(), "Tensor.numpy", "on the host"),
    "equal": (lambda x: torch.equal(x, x), "aten.equal", "on the host"),
    "nonzero": (lambda x: x.nonzero(), "aten.nonzero", "depends on data"),
    "mask": (lambda x: x[x > 1], "aten.index.Tensor", "data-dependent shape"),
    "unique": (lambda x: torch.unique(x), "aten._unique2", "depends on data"),
    "masked_select": (lambda x: x.masked_select(x > 1), "aten.masked_select", "depends on data"),
    "rand": (lambda x: x + torch.rand(3, 4), "aten.rand", "random generator"),
    "multinomial": (lambda x: (x + 1).multinomial(1), "aten.multinomial", "random generator"),
    "dropout": (lambda x: F.dropout(x, 0.5, True), "aten.bernoulli_", "random generator"),
    "to": (lambda x: x.to("meta"), "aten._to_copy", "between devices"),
    "tensor": (lambda x: x + torch.tensor([1.0, 2.0, 3.0, 4.0]), "aten.lift_fresh", "host data"),
    "resize": (lambda x: (x + 1).resize_(2, 2), "aten.resize_", "shape or address"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_cuda_graph_could_not_hold_is_refused(
    backend: RecordedGraphBackend, x: torch.Tensor, name: str
) -> None:
    function, op, reason = REFUSED[name]

    def step() -> Tensors:
        function(x)
        return (x,)

    with pytest.raises(CaptureError) as error:
        backend.capture(step)
    text = str(error.value)
    assert op in text and reason in text
    assert f"{__file__}:" in text  # and the line that did it


def test_fused_attention_without_dropout_is_recorded(backend: RecordedGraphBackend) -> None:
    q = torch.randn(1, 2, 4, 8)
    check_replay(backend, lambda: (F.scaled_dot_product_attention(q, q, q),), q)


def test_the_backend_stays_usable_after_a_refusal(
    backend: RecordedGraphBackend, x: torch.Tensor
) -> None:
    with pytest.raises(CaptureError):
        backend.capture(lambda: (x.nonzero(),))
    check_replay(backend, lambda: (x + 1,), x)


def test_memory_of_a_dropped_result_goes_to_the_next_smaller_capture(
    backend: RecordedGraphBackend, x: torch.Tensor
) -> None:
    big, outputs = backend.capture(lambda: (x * 2,))
    alias = backend.alias(outputs[0])
    address = alias.data_ptr()
    kept, _outputs = backend.capture(lambda: (x[:2] * 3,))
    assert backend.pool_bytes() == 48 + 32  # the owner lived: no sharing
    del outputs
    gc.collect()
    small, others = backend.capture(lambda: (x[:2] * 5,))
    assert others[0].data_ptr() == address and backend.pool_bytes() == 80
    # both still replay, one after the other
    small.replay()
    assert torch.equal(others[0], x[:2] * 5)
    big.replay()
    assert torch.equal(alias, x * 2)
    kept.replay()
    assert torch.equal(_outputs[0], x[:2] * 3)


def test_the_pool_hands_out_the_smallest_block_that_fits() -> None:
    pool = MemoryPool()
    blocks = [pool.take(size) for size in (100, 10, 50)]
    for block in blocks:
        pool.give_back(block)
    assert pool.take(20) is blocks[2]
    assert pool.take(60) is blocks[0]
    assert pool.take(60) is not blocks[0]
    assert pool.nbytes == 220


def test_capture_reports_seconds_and_bytes(backend: RecordedGraphBackend, x: torch.Tensor) -> None:
    graph, _outputs = backend.capture(lambda: (x * 2,), warmups=1)
    assert graph.nbytes == 48
    assert 0 < graph.seconds < 10
