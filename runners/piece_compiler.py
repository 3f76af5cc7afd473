"""What runs inside a piece: the FX graph itself, or Inductor code compiled once for all sizes.

Called while torch.compile is in our backend, because Inductor takes the symbolic shapes from
the trace that is going on. This file knows no capture.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch._guards import detect_fake_mode

from duograph.kernels.custom_op import is_split_op

Piece = Callable[[list[Any]], Any]
"""Takes its arguments in a list, which it empties: a tensor that nobody else holds is free after
its last read, as in the plain forward."""


def compile_pieces(
    cut: torch.fx.GraphModule, example_inputs: Sequence[Any], compiler: str
) -> dict[str, Piece]:
    """The pieces of a cut graph by submodule name; split ops are none.

    Args:
        example_inputs: what torch.compile gave its backend: tensors and symbols.
        compiler: "eager" or "inductor".
    """
    modules = {
        name: module
        for name, module in cut.named_children()
        if isinstance(module, torch.fx.GraphModule) and not _is_split_module(module)
    }
    if compiler == "eager":
        return {name: _Interpreted(module) for name, module in modules.items()}
    inputs = _fake_inputs(cut, example_inputs)
    return {name: _compile(module, inputs[name]) for name, module in modules.items()}


class _Interpreted:
    """Runs node by node, which only happens at capture: an op that cannot be captured is then
    reported with the line of the model that it came from."""

    def __init__(self, module: torch.fx.GraphModule) -> None:
        self._interpreter = torch.fx.Interpreter(module)
        self.operations = _operations(module)

    def __call__(self, arguments: list[Any]) -> Any:
        try:
            return self._interpreter.boxed_run(arguments)
        finally:
            # It would keep the results until the next call, and with them graph memory: 117 MB
            # a piece of a 1B model at 8192 tokens.
            self._interpreter.env.clear()


def _operations(module: torch.fx.GraphModule) -> tuple[object, ...]:
    """What the module calls, in order, with its floats, which kernels are compiled for; whole
    numbers such as the layer's pick memory and no kernel."""
    calls = []
    for node in module.graph.nodes:
        if node.op not in ("placeholder", "output"):
            arguments = (*node.args, *node.kwargs.values())
            calls.append((str(node.target), *(a for a in arguments if isinstance(a, float))))
    return tuple(calls)


def kernels_key(piece: Piece, arguments: Sequence[Any]) -> object | None:
    """Equal for two calls that launch the same kernels, as those of a model's like layers do:
    after one of them the other finds all of its kernels loaded. None for compiled code, of which
    every piece has its own."""
    if not isinstance(piece, _Interpreted):
        return None
    return piece.operations, tuple(map(_what_kernels_see, arguments))


def _what_kernels_see(argument: Any) -> object:
    if isinstance(argument, torch.Tensor):
        aligned = argument.data_ptr() % 16 == 0  # Triton compiles for either
        return argument.shape, argument.stride(), argument.dtype, aligned
    return argument


def _compile(module: torch.fx.GraphModule, inputs: list[Any]) -> Piece:
    # Costs 3 s of imports, which a start without Inductor must not pay.
    from torch._inductor import standalone_compile

    # A copy, because compiling changes the graph, and Inductor wants one that returns a tuple.
    graph = torch.fx.Graph()
    result: Any = graph.graph_copy(module.graph, {})
    several = isinstance(result, (tuple, list))
    graph.output(tuple(result) if several else (result,))
    copied = torch.fx.GraphModule(module, graph)
    compiled = standalone_compile(copied, inputs, dynamic_shapes="from_tracing_context")
    return partial(_call_compiled, compiled, several)


def _call_compiled(compiled: Callable[..., Any], several: bool, arguments: list[Any]) -> Any:
    given = tuple(arguments)
    arguments.clear()
    result = compiled(*given)  # which holds all of them to its end
    return result if several else result[0]


def _fake_inputs(cut: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> dict[str, list[Any]]:
    """Fake tensors and symbols that each submodule is called with, by running the cut graph
    on fake twins of the example inputs."""
    fake_mode = detect_fake_mode()  # of the trace: it knows which dimensions are symbols
    assert fake_mode is not None
    remaining = iter(example_inputs)
    values: dict[torch.fx.Node, Any] = {}
    inputs: dict[str, list[Any]] = {}
    with fake_mode:
        for node in cut.graph.nodes:
            arguments = torch.fx.node.map_arg(node.args, values.__getitem__)
            if node.op == "placeholder":
                value = next(remaining)
                is_tensor = isinstance(value, torch.Tensor)
                values[node] = fake_mode.from_tensor(value) if is_tensor else value
            elif node.op == "call_module":
                inputs[str(node.target)] = list(arguments)
                values[node] = getattr(cut, str(node.target))(*arguments)
            elif node.op == "call_function":
                values[node] = node.target(*arguments)
    return inputs


def _is_split_module(module: torch.fx.GraphModule) -> bool:
    return any(is_split_op(node.target) for node in module.graph.nodes)
