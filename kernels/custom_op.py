"""The only door for kernels that torch.compile must not look into, and the list of split ops.

An op says at its definition that it splits the prefill graph; the piecewise cutter asks
``is_split_op`` and never hears of an op by any other way. This file knows no model, batch or
backend.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import torch

NAMESPACE = "duograph"

P = ParamSpec("P")
R = TypeVar("R")

_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]

# The one piece of module-level mutable state in the project: filled at import by the
# decorators below and only read afterwards.
_SPLIT_OPS: set[str] = set()
_FUNCTIONS: dict[str, Callable[..., Any]] = {}


def register_custom_op(
    name: str,
    *,
    mutates: Sequence[str],
    fake: Callable[..., Any] | None = None,
    split_point: bool = False,
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Registers the decorated function as the opaque op ``duograph::<name>``.

    Args:
        name: op name inside the ``duograph`` namespace.
        mutates: names of the tensor arguments the function writes to.
        fake: shape function used while tracing. May be left out when the op returns nothing.
        split_point: True makes the prefill cutter end a piece before this op and start a
            new one after it; the op itself then runs eagerly between two replays.

    Returns:
        A decorator. The decorated name becomes the callable op, so that eager code, a
        recorder and torch.compile all see the same single node.

    Raises:
        ValueError: ``name`` is registered already.
    """
    qualified = f"{NAMESPACE}::{name}"

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        if hasattr(getattr(torch.ops, NAMESPACE), name):
            raise ValueError(f"custom op {qualified} is registered twice")
        # Not torch.library.custom_op: its autograd and version wrappers cost 47 us a call
        # where this costs 5 (measured, one CPU thread), and a layer makes several calls.
        schema = torch.library.infer_schema(function, mutates_args=tuple(mutates))
        _LIBRARY.define(name + schema)  # type: ignore[no-untyped-call]
        _LIBRARY.impl(  # type: ignore[no-untyped-call]
            name, function, "CompositeExplicitAutograd"
        )
        torch.library.register_fake(
            qualified, fake if fake is not None else _returns_nothing, lib=_LIBRARY
        )
        _FUNCTIONS[f"{NAMESPACE}.{name}"] = function
        if split_point:
            _SPLIT_OPS.add(f"{NAMESPACE}.{name}")
        overload: Callable[P, R] = getattr(getattr(torch.ops, NAMESPACE), name).default
        return overload

    return decorate


def is_split_op(target: object) -> bool:
    """True if ``target``, an FX node target, is an overload of a registered split op."""
    if isinstance(target, torch._ops.OpOverload):
        return str(target.overloadpacket) in _SPLIT_OPS
    return isinstance(target, torch._ops.OpOverloadPacket) and str(target) in _SPLIT_OPS


def function_of(target: Callable[..., Any]) -> Callable[..., Any]:
    """The function behind an op registered here; any other callable is returned as it is.

    For code that runs an op again and again where nothing is traced or recorded: the dispatcher
    costs 5 us a call."""
    packet = target.overloadpacket if isinstance(target, torch._ops.OpOverload) else target
    return _FUNCTIONS.get(str(packet), target)


def _returns_nothing(*args: Any, **kwargs: Any) -> None:
    return None
