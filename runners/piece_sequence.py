"""One level of prefill: capturing its pieces, and the program that comes out.

Works on a graph that is cut already. This file knows neither how it was cut (``piecewise.py``)
nor how a piece is captured (``graph.py``), and no batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from duograph.kernels.custom_op import function_of
from duograph.runners.graph import CaptureError, Graph, GraphBackend
from duograph.runners.piece_compiler import Piece, kernels_key


@dataclass(slots=True)
class PieceSequence:
    """One level: the program and where its result lies.

    Attributes:
        output: hidden states [level, hidden_size]; pool memory, good until the next replay.
        pieces: the graphs among the steps, in order.
        head: steps before the first split op.
    """

    output: torch.Tensor
    steps: list[Callable[[], object]] = field(default_factory=list)
    pieces: list[Graph] = field(default_factory=list)
    head: int = 0
    seconds: float = 0.0
    nbytes: int = 0

    def replay(self) -> None:
        """Split ops in the program read the forward context of the caller."""
        self.start()
        self.finish()

    def start(self) -> None:
        """What comes before the first split op, and so needs nothing but the static inputs. The
        device computes it while the host prepares what the split ops read."""
        for step in self.steps[: self.head]:
            step()

    def finish(self) -> None:
        """The rest."""
        for step in self.steps[self.head :]:
            step()


class LevelCapture:
    """Runs the cut graph once, capturing pieces, and writes down the program.

    Two views of every intermediate: its owner, dropped at its last read so that what comes
    later may take its memory, as in an eager run; and an alias, which the program keeps.
    """

    def __init__(self, backend: GraphBackend, pieces: dict[str, Piece], warmups: int) -> None:
        self._backend = backend
        self._pieces = pieces
        self._warmups = warmups
        self._warm: set[object] = set()  # what has been called in this level
        self._steps: list[Callable[[], object]] = []
        self._values: dict[torch.fx.Node, Any] = {}  # aliases
        self._owned: dict[torch.fx.Node, Any] = {}  # the same values, owning their memory
        # owners of the memory that a value lies in without owning it
        self._borrowed: dict[torch.fx.Node, list[torch.Tensor]] = {}
        self._last_reads: dict[torch.fx.Node, list[torch.fx.Node]] = {}
        self._graphs: list[Graph] = []
        self._head: int | None = None
        self._seconds = 0.0
        self._nbytes = 0

    def run(self, cut: torch.fx.GraphModule, arguments: list[Any]) -> PieceSequence:
        """``cut``: nodes are pieces, split ops and items of their results; ``arguments`` are its
        inputs at this level.

        Raises:
            CaptureError: a piece cannot be captured, or the result is not one tensor.
        """
        remaining = iter(arguments)
        self._last_reads = _last_reads(cut.graph)
        output: torch.Tensor | None = None
        for node in cut.graph.nodes:
            if node.op == "placeholder":
                self._values[node] = next(remaining)
            elif node.op == "output":
                output = _only_tensor(self._resolve(node.args[0]))
            elif node.op == "call_module" and node.target in self._pieces:
                self._capture_piece(node)
            elif node.op == "call_module":
                self._call_split(node, getattr(cut, node.target))
            else:
                self._unpack(node)
            self._drop_what_nobody_reads_after(node)
        assert output is not None
        return PieceSequence(
            output,
            self._steps,
            head=len(self._steps) if self._head is None else self._head,
            pieces=self._graphs,
            seconds=self._seconds,
            nbytes=self._nbytes,
        )

    def _capture_piece(self, node: torch.fx.Node) -> None:
        function = self._pieces[str(node.target)]
        key = kernels_key(function, self._resolve(node.args))
        warmups = 0 if key is not None and key in self._warm else self._warmups
        piece = _PieceCall(function, self._arguments_of(node), last_call=warmups)
        graph, outputs = self._backend.capture(piece, warmups=warmups)
        self._warm.add(key)
        self._steps.append(graph.replay)
        self._graphs.append(graph)
        self._seconds += graph.seconds
        self._nbytes += graph.nbytes
        self._values[node] = piece.rebuild([self._backend.alias(tensor) for tensor in outputs])
        self._owned[node] = piece.rebuild(outputs)
        # an output that is a view of an input must keep that input's memory too
        self._borrowed[node] = _sharing(self._owners_among(node.all_input_nodes), outputs)

    def _arguments_of(self, node: torch.fx.Node) -> list[Any]:
        """What a piece is called with. Where a graph keeps no tensors these are the owners, and
        the only ones of what no later node reads."""
        if self._backend.keeps_tensors:
            return list(self._resolve(node.args))
        owners = {
            source: self._owned.get(source, self._values[source]) for source in node.all_input_nodes
        }
        arguments = torch.fx.node.map_arg(node.args, owners.__getitem__)
        self._drop_what_nobody_reads_after(node)
        return list(arguments)

    def _unpack(self, node: torch.fx.Node) -> None:
        """``operator.getitem`` on the results of a piece or a split op."""
        source, index = node.args
        assert isinstance(source, torch.fx.Node)
        self._values[node] = self._values[source][index]
        if source in self._owned:
            self._owned[node] = self._owned[source][index]
            tensors = _tensors(self._values[node])
            self._borrowed[node] = _sharing(self._borrowed[source], tensors)

    def _drop_what_nobody_reads_after(self, node: torch.fx.Node) -> None:
        for dead in self._last_reads.get(node, ()):
            self._owned.pop(dead, None)
            self._borrowed.pop(dead, None)

    def _call_split(self, node: torch.fx.Node, module: torch.fx.GraphModule) -> None:
        if self._head is None:
            self._head = len(self._steps)
        call = _as_one_call(module, self._resolve(node.args))
        result = call()
        if not _tensors(result):
            self._steps.append(call)
            self._values[node] = result
            return
        # An op that makes its own result would leave the next piece with an old address:
        # every run copies the result to where it was at capture.
        fixed = [tensor.clone() for tensor in _tensors(result)]
        self._steps.append(partial(_call_and_copy, call, fixed))
        self._values[node] = fixed[0] if isinstance(result, torch.Tensor) else tuple(fixed)

    def _resolve(self, argument: Any) -> Any:
        return torch.fx.node.map_arg(argument, lambda node: self._values[node])

    def _owners_among(self, nodes: Sequence[torch.fx.Node]) -> list[torch.Tensor]:
        return [
            owner
            for node in nodes
            for owner in (*_tensors(self._owned.get(node)), *self._borrowed.get(node, ()))
        ]


class _PieceCall:
    """A piece with its arguments, as the callable over static tensors that a backend takes.
    A piece may also return ints made from the number of tokens; those are constants here.

    The arguments are given away in the last call, the one that is captured."""

    def __init__(self, piece: Piece, arguments: list[Any], *, last_call: int) -> None:
        """``last_call``: how many calls come before it."""
        self._piece = piece
        self._arguments = arguments
        self._calls_left = last_call
        self._single = False
        self._items: list[Any] = []  # of the result, with None in place of tensors

    def __call__(self) -> list[torch.Tensor]:
        self._calls_left -= 1
        result = self._piece(self._arguments if self._calls_left < 0 else [*self._arguments])
        self._single = not isinstance(result, (tuple, list))
        items = [result] if self._single else list(result)
        # the tensors themselves must not outlive the capture
        self._items = [None if isinstance(item, torch.Tensor) else item for item in items]
        return _tensors(result)

    def rebuild(self, tensors: Sequence[torch.Tensor]) -> Any:
        """The result with ``tensors`` for its tensors."""
        remaining = iter(tensors)
        items = [next(remaining) if item is None else item for item in self._items]
        return items[0] if self._single else tuple(items)


def _as_one_call(module: torch.fx.GraphModule, arguments: Sequence[Any]) -> Callable[[], Any]:
    """The function of the split op with its arguments bound, without the module and the
    dispatcher around it: the program runs it once a layer."""
    nodes = list(module.graph.nodes)
    calls = [node for node in nodes if node.op == "call_function"]
    if len(calls) > 1:
        return partial(module, *arguments)
    placeholders = [node for node in nodes if node.op == "placeholder"]
    bound = dict(zip(placeholders, arguments, strict=True))
    args, kwargs = torch.fx.node.map_arg((calls[0].args, calls[0].kwargs), bound.__getitem__)
    return partial(function_of(calls[0].target), *args, **kwargs)


def _call_and_copy(call: Callable[[], Any], fixed: list[torch.Tensor]) -> None:
    for destination, source in zip(fixed, _tensors(call()), strict=True):
        destination.copy_(source)


def _last_reads(graph: torch.fx.Graph) -> dict[torch.fx.Node, list[torch.fx.Node]]:
    """For each node, those whose value nobody reads after it."""
    last: dict[torch.fx.Node, torch.fx.Node] = {}
    for node in graph.nodes:
        last[node] = node
        for source in node.all_input_nodes:
            last[source] = node
    result: dict[torch.fx.Node, list[torch.fx.Node]] = {}
    for source, reader in last.items():
        result.setdefault(reader, []).append(source)
    return result


def _only_tensor(result: Any) -> torch.Tensor:
    items = result if isinstance(result, (tuple, list)) else (result,)
    if len(items) != 1 or not isinstance(items[0], torch.Tensor):
        raise CaptureError("the prefill forward must return one tensor of hidden states")
    return items[0]


def _tensors(value: Any) -> list[torch.Tensor]:
    items = value if isinstance(value, (tuple, list)) else (value,)
    return [item for item in items if isinstance(item, torch.Tensor)]


def _sharing(owners: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Those of ``owners`` whose memory one of ``tensors`` lies in."""
    return [owner for owner in owners if any(_overlap(owner, tensor) for tensor in tensors)]


def _overlap(first: torch.Tensor, second: torch.Tensor) -> bool:
    return first.data_ptr() < _end(second) and second.data_ptr() < _end(first)


def _end(tensor: torch.Tensor) -> int:
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in steps)
    return tensor.data_ptr() + (last + 1) * tensor.element_size()
