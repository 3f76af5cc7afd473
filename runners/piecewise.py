"""Cutting the prefill forward at split ops, and capturing what lies between them.

A ``Cutter`` turns the model into pieces once and captures them level by level. What it gives
back for one level, a ``PieceSequence``, is a flat program: replay a piece, call a split op on
the fixed tensors that the piece left, replay the next piece. Nothing of the tracer is left in
it, so no guard runs and nothing can recompile while requests are served.

``TorchCompileCutter`` lets torch.compile trace the forward with a dynamic number of tokens and
cuts the FX graph that its backend is given. This file knows no batch and no bucket.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch.fx.passes.split_module import split_module

from duograph.kernels.custom_op import function_of, is_split_op
from duograph.runners.graph import CaptureError, Graph, GraphBackend
from duograph.runners.parts import Transformer
from duograph.runners.piece_compiler import compile_pieces, kernels_key


class RecompileError(RuntimeError):
    """The model was traced again after start-up."""


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


class Cutter(Protocol):
    """How a forward becomes pieces. ``recompiles`` counts traces after ``seal``."""

    name: str
    recompiles: int

    def prepare(
        self, forward: Transformer, input_ids: torch.Tensor, positions: torch.Tensor
    ) -> None:
        """Once, before any capture; int64 [n] sample inputs. Runs the forward.

        Raises:
            CaptureError: the forward cannot be cut.
        """

    def capture(
        self, backend: GraphBackend, input_ids: torch.Tensor, positions: torch.Tensor, warmups: int
    ) -> PieceSequence:
        """Captures every piece over the given static tensors, int64 [level]."""

    def seal(self) -> None:
        """Start-up is over: from now on a trace is an error."""


class TorchCompileCutter:
    """torch.compile traces once; pieces run as FX graphs or as Inductor code."""

    def __init__(self, compiler: str) -> None:
        """``compiler``: "eager" (the FX graph itself) or "inductor"."""
        self.name = f"torch.compile/{compiler}"
        self.recompiles = 0
        self.traced: Transformer | None = None
        self._compiler = compiler
        self._sealed = False
        self._cut: torch.fx.GraphModule | None = None
        self._pieces: dict[str, Callable[..., Any]] = {}
        self._is_symbol: list[bool] = []
        self._arguments: list[Any] = []
        self._sample: tuple[torch.Tensor, torch.Tensor] | None = None

    def prepare(
        self, forward: Transformer, input_ids: torch.Tensor, positions: torch.Tensor
    ) -> None:
        if input_ids.shape[0] > 1:  # a dimension of one is always static
            torch._dynamo.mark_dynamic(input_ids, 0)
            torch._dynamo.mark_dynamic(positions, 0)
        self._sample = (input_ids, positions)
        # dynamic=None: only the marked dimensions
        traced = torch.compile(forward, backend=self._receive, fullgraph=True)
        try:
            with torch.no_grad():
                traced(input_ids, positions)
        except torch._dynamo.exc.TorchDynamoException as error:
            raise CaptureError(
                f"torch.compile cannot trace the prefill forward: {error}"
            ) from error
        self.traced = traced

    def seal(self) -> None:
        self._sealed = True

    def _receive(
        self, module: torch.fx.GraphModule, example_inputs: Sequence[Any]
    ) -> Callable[..., Any]:
        """The torch.compile backend: cuts the graph and remembers its arguments."""
        if self._sealed:
            self.recompiles += 1
            raise RecompileError(
                "the prefill forward was traced again after start-up; the call differs from "
                "what was captured and must run eagerly"
            )
        self._is_symbol = [isinstance(value, torch.SymInt) for value in example_inputs]
        self._cut = _cut_at_split_ops(module)
        self._pieces = compile_pieces(self._cut, example_inputs, self._compiler)

        def first_call(*arguments: Any) -> Any:
            self._arguments = list(arguments)
            assert self._cut is not None
            return self._cut(*arguments)

        return first_call

    def capture(
        self, backend: GraphBackend, input_ids: torch.Tensor, positions: torch.Tensor, warmups: int
    ) -> PieceSequence:
        assert self._cut is not None, "prepare() comes first"
        arguments = [
            self._argument_for_level(index, input_ids, positions)
            for index in range(len(self._arguments))
        ]
        with torch.no_grad():
            return _LevelCapture(backend, self._pieces, warmups).run(self._cut, arguments)

    def _argument_for_level(
        self, index: int, input_ids: torch.Tensor, positions: torch.Tensor
    ) -> Any:
        assert self._sample is not None
        value = self._arguments[index]
        if self._is_symbol[index]:
            return input_ids.shape[0]  # the token dimension is the only dynamic one
        if value is self._sample[0]:
            return input_ids
        if value is self._sample[1]:
            return positions
        return value  # a parameter or buffer of the model


class _LevelCapture:
    """Runs the cut graph once, capturing pieces, and writes down the program.

    Two views of every intermediate: its owner, dropped after the last node that reads it so
    that later pieces may take its memory, as in an eager run; and an alias, which the program
    and the pieces keep.
    """

    def __init__(
        self, backend: GraphBackend, pieces: dict[str, Callable[..., Any]], warmups: int
    ) -> None:
        self._backend = backend
        self._pieces = pieces
        self._warmups = warmups
        self._warm: set[object] = set()  # what has been called in this level
        self._steps: list[Callable[[], object]] = []
        self._values: dict[torch.fx.Node, Any] = {}
        self._owners: dict[torch.fx.Node, list[torch.Tensor]] = {}
        self._graphs: list[Graph] = []
        self._head: int | None = None
        self._seconds = 0.0
        self._nbytes = 0

    def run(self, cut: torch.fx.GraphModule, arguments: list[Any]) -> PieceSequence:
        remaining = iter(arguments)
        last_reads = _last_reads(cut.graph)
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
            else:  # operator.getitem on the results of a piece or a split op
                value = self._values[node] = node.target(*self._resolve(node.args))
                self._owners[node] = _sharing(self._owners_of(node), _tensors(value))
            for dead in last_reads.get(node, ()):
                self._owners.pop(dead, None)
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
        arguments = self._resolve(node.args)
        function = self._pieces[str(node.target)]
        piece = _PieceCall(function, arguments)
        key = kernels_key(function, arguments)
        warmups = 0 if key is not None and key in self._warm else self._warmups
        graph, outputs = self._backend.capture(piece, warmups=warmups)
        self._warm.add(key)
        self._steps.append(graph.replay)
        self._graphs.append(graph)
        self._seconds += graph.seconds
        self._nbytes += graph.nbytes
        self._values[node] = piece.rebuild([self._backend.alias(tensor) for tensor in outputs])
        # an output that is a view of an input must keep that input's memory too
        self._owners[node] = [*outputs, *_sharing(self._owners_of(node), outputs)]

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

    def _owners_of(self, node: torch.fx.Node) -> list[torch.Tensor]:
        return [owner for source in node.all_input_nodes for owner in self._owners.get(source, ())]


class _PieceCall:
    """A piece with its arguments, as the callable over static tensors that a backend takes.
    A piece may also return ints made from the number of tokens; those are constants here."""

    def __init__(self, piece: Callable[..., Any], arguments: Sequence[Any]) -> None:
        self._piece = piece
        self._arguments = arguments
        self._single = False
        self._items: list[Any] = []  # of the result, with None in place of tensors

    def __call__(self) -> list[torch.Tensor]:
        result = self._piece(*self._arguments)
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


def _cut_at_split_ops(module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Consecutive nodes that are no split op form one submodule, each split op another."""
    part_of: dict[torch.fx.Node, int] = {}
    part, in_split = 0, False
    for node in module.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        if is_split_op(node.target):
            part, in_split = part + 1, True
        elif in_split and not _unpacks_split_op(node):
            part, in_split = part + 1, False
        part_of[node] = part
    cut: torch.fx.GraphModule = split_module(
        module,
        None,  # type: ignore[arg-type]
        lambda node: part_of[node],
        keep_original_order=True,
    )
    return cut


def _unpacks_split_op(node: torch.fx.Node) -> bool:
    """Taking an item of the tuple that a split op returned stays with the op."""
    source = node.args[0] if node.args else None
    is_item = node.target is operator.getitem and isinstance(source, torch.fx.Node)
    return is_item and is_split_op(source.target)  # type: ignore[union-attr]


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
