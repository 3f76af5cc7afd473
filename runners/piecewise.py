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
from typing import Any, Protocol

import torch
from torch.fx.passes.split_module import split_module

from duograph.kernels.custom_op import is_split_op
from duograph.runners.graph import CaptureError, GraphBackend
from duograph.runners.parts import Transformer
from duograph.runners.piece_compiler import Piece, compile_pieces
from duograph.runners.piece_sequence import LevelCapture, PieceSequence


class RecompileError(RuntimeError):
    """The model was traced again after start-up."""


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
        self._pieces: dict[str, Piece] = {}
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
            return LevelCapture(backend, self._pieces, warmups).run(self._cut, arguments)

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
