"""What runs inside a piece: the FX graph itself, or Inductor code compiled once for all sizes.

Called while torch.compile is in our backend, because Inductor takes the symbolic shapes from
the trace that is going on. This file knows no capture.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch._guards import detect_fake_mode
from torch._inductor import standalone_compile

from duograph.kernels.custom_op import is_split_op

Piece = Callable[..., Any]


def compile_pieces(cut: torch.fx.GraphModule, compiler: str) -> dict[str, Piece]:
    """The pieces of a cut graph by submodule name; split ops are none.

    Args:
        compiler: "eager" or "inductor".
    """
    modules = {
        name: module
        for name, module in cut.named_children()
        if isinstance(module, torch.fx.GraphModule) and not _is_split_module(module)
    }
    if compiler == "eager":
        # Interpreted, which only happens at capture: an op that cannot be captured is then
        # reported with the line of the model that it came from.
        return {name: torch.fx.Interpreter(module).run for name, module in modules.items()}
    inputs = _fake_inputs(cut)
    return {name: _compile(module, inputs[name]) for name, module in modules.items()}


def _compile(module: torch.fx.GraphModule, inputs: list[Any]) -> Piece:
    output = next(node for node in module.graph.nodes if node.op == "output")
    single = not isinstance(output.args[0], (tuple, list))
    if single:  # Inductor takes graphs that return a tuple
        output.args = ((output.args[0],),)
        module.recompile()
    compiled = standalone_compile(module, inputs, dynamic_shapes="from_tracing_context")
    return partial(_first_result, compiled) if single else compiled


def _first_result(compiled: Piece, *arguments: Any) -> Any:
    return compiled(*arguments)[0]


def _fake_inputs(cut: torch.fx.GraphModule) -> dict[str, list[Any]]:
    """Fake tensors and symbols that each submodule is called with, by running the cut graph
    on the fake values of the trace."""
    values: dict[torch.fx.Node, Any] = {}
    inputs: dict[str, list[Any]] = {}
    placeholders = [node for node in cut.graph.nodes if node.op == "placeholder"]
    for node in placeholders:
        values[node] = node.meta["example_value"]
    fake_mode = detect_fake_mode([value for value in values.values() if _is_tensor(value)])
    assert fake_mode is not None
    with fake_mode:
        for node in cut.graph.nodes:
            arguments = torch.fx.node.map_arg(node.args, values.__getitem__)
            if node.op == "call_module":
                inputs[str(node.target)] = list(arguments)
                values[node] = getattr(cut, str(node.target))(*arguments)
            elif node.op == "call_function":
                values[node] = node.target(*arguments)
    return inputs


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _is_split_module(module: torch.fx.GraphModule) -> bool:
    return any(is_split_op(node.target) for node in module.graph.nodes)
