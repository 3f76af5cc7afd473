"""Recording the ATen ops of one call: which arguments are constants, which op may be in a graph.

The other half, replaying the list and owning its memory, is in ``recorded_graph.py``, whose head
explains slots. This file knows no model, batch or bucket.
"""

from __future__ import annotations

import operator
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from duograph.runners.graph import CaptureError

_TORCH_FOLDER = str(Path(torch.__file__).parent)

# Reads of tensor data that never reach the dispatcher.
_HOST_READS = frozenset(
    {torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__, torch.Tensor.item}
)
_NEW_ADDRESS = ("aten::resize_", "aten::set_", "aten::resize_as_")
_INDEXING = ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_")


class Node:
    """One call of the flat list: ``slots[outputs] = function(*arguments(slots))``."""

    __slots__ = ("arguments", "dead", "function", "inputs", "outputs")

    def __init__(
        self, function: Callable[..., Any], inputs: Sequence[int], outputs: tuple[int | None, ...]
    ) -> None:
        self.function = function
        self.inputs = tuple(inputs)
        self.outputs = outputs
        self.dead: tuple[int, ...] = ()
        # One C call that gathers all arguments. Of a single index itemgetter gives the item
        # itself, of a slice always a list.
        self.arguments: Callable[[list[Any]], Sequence[Any]] = (
            operator.itemgetter(*inputs)
            if len(inputs) > 1
            else operator.itemgetter(slice(inputs[0], inputs[0] + 1) if inputs else slice(0))
        )


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Collects nodes while the recorded callable runs, for real, under it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.inside_op = False
        self._nodes: list[Node] = []
        self._slots: list[Any] = []
        self._slot_of: dict[int, int] = {}  # id of a tensor -> its slot
        self._values: set[int] = set()  # slots filled at replay
        self._value_storages: set[int] = set()
        # ids and addresses are only unique while the tensors live
        self._alive: list[torch.Tensor] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        _refuse_unsafe(func, args, kwargs)
        # before the call, which may return one of them
        function, inputs = self._arguments(func, args, kwargs)
        self.inside_op = True
        try:
            result = func(*args, **kwargs)
        finally:
            self.inside_op = False
        self._record(func, function, inputs, result)
        return result

    def is_value(self, tensor: torch.Tensor) -> bool:
        """True if each replay makes ``tensor`` anew; False if it is a constant."""
        return self._slot(tensor) in self._values

    def add_call(self, function: Callable[[torch.Tensor], None], tensor: torch.Tensor) -> None:
        """Appends ``function(tensor)``, run after all that is recorded so far."""
        self._nodes.append(Node(function, (self._slot(tensor),), (None,)))

    def finish(self) -> tuple[list[Node], list[Any]]:
        """The flat list, with each value's last reader clearing it, and the initial slots."""
        seen: set[int] = set()
        for node in reversed(self._nodes):
            touched = {*node.inputs, *(slot for slot in node.outputs if slot is not None)}
            node.dead = tuple(sorted((touched & self._values) - seen))
            seen |= touched
        self._alive.clear()
        return self._nodes, self._slots

    def _record(
        self, func: Any, function: Callable[..., Any], inputs: list[int], result: Any
    ) -> None:
        several = isinstance(result, (tuple, list))
        tensors = list(result) if several else [result]
        folds = self._folds_to_constant(func, inputs, tensors)
        outputs: list[int | None] = []
        for tensor in tensors:
            if not isinstance(tensor, torch.Tensor):
                if tensor is not None:
                    raise _refusal(func, "its result is a value on the host")
                outputs.append(None)
            elif id(tensor) in self._slot_of:  # in place: the argument itself came back
                outputs.append(None)
            elif folds:
                self._constant(tensor)
            else:
                outputs.append(self._value(tensor))
        if not folds:
            # a list of one result must be unpacked like a longer one
            ends = (*outputs, None) if several and len(outputs) == 1 else tuple(outputs)
            self._nodes.append(Node(function, inputs, ends))

    def _folds_to_constant(self, func: Any, inputs: list[int], results: list[Any]) -> bool:
        """A view of constant tensors has a constant address: nothing is left to replay."""
        aliases = [item.alias_info for item in func._schema.returns]
        if not aliases or any(info is None or info.is_write for info in aliases):
            return False
        if any(slot in self._values for slot in inputs):
            return False
        sources = {
            value.untyped_storage().data_ptr()
            for value in (self._slots[slot] for slot in inputs)
            if isinstance(value, torch.Tensor)
        }
        return all(tensor.untyped_storage().data_ptr() in sources for tensor in results)

    def _arguments(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Callable[..., Any], list[int]]:
        inputs = [self._slot(value) for value in args]
        if not kwargs:
            return func, inputs
        if not any(_holds_tensor(value) for value in kwargs.values()):
            return partial(func, **kwargs), inputs
        names = tuple(kwargs)
        inputs += [self._slot(value) for value in kwargs.values()]
        return partial(_call_with_names, func, names), inputs

    def _slot(self, value: Any) -> int:
        if isinstance(value, torch.Tensor):
            known = self._slot_of.get(id(value))
            return self._constant(value) if known is None else known
        if isinstance(value, (list, tuple)) and _holds_tensor(value):
            inputs = [self._slot(item) for item in value]
            if not any(slot in self._values for slot in inputs):
                return self._append(list(value))
            slot = self._append(None)
            self._values.add(slot)
            self._nodes.append(Node(_as_list, inputs, (slot,)))
            return slot
        return self._append(value)

    def _constant(self, tensor: torch.Tensor) -> int:
        address = tensor.untyped_storage().data_ptr()
        if address and address in self._value_storages:
            raise CaptureError(
                "an intermediate tensor is reached through an alias that no op made "
                f"(Tensor.data, for example) at {_call_site()}"
            )
        self._alive.append(tensor)
        self._slot_of[id(tensor)] = slot = self._append(tensor)
        return slot

    def _value(self, tensor: torch.Tensor) -> int:
        self._alive.append(tensor)
        self._value_storages.add(tensor.untyped_storage().data_ptr())
        self._slot_of[id(tensor)] = slot = self._append(None)
        self._values.add(slot)
        return slot

    def _append(self, value: Any) -> int:
        self._slots.append(value)
        return len(self._slots) - 1


class HostReadGuard(TorchFunctionMode):
    """Refuses ``tolist`` and its like, which read memory behind the dispatcher's back."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # the body of a custom op is opaque, as a kernel is
        if func in _HOST_READS and not self._recorder.inside_op:
            raise CaptureError(_text(f"Tensor.{func.__name__}", "it reads values on the host"))
        return func(*args, **(kwargs or {}))


def _refuse_unsafe(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    tags = func.tags
    name = func.name().split(".")[0]
    if name in _INDEXING:
        if any(t is not None and t.dtype in (torch.bool, torch.uint8) for t in args[1]):
            raise _refusal(func, "a mask as index has a data-dependent shape; use torch.where")
    elif torch.Tag.dynamic_output_shape in tags:
        raise _refusal(func, "the shape of its result depends on data")
    if torch.Tag.data_dependent_output in tags or name == "aten::_local_scalar_dense":
        raise _refusal(func, "it reads values on the host (.item(), bool(), int())")
    if torch.Tag.nondeterministic_seeded in tags and not _draws_nothing(func, args, kwargs):
        raise _refusal(func, "it draws from a random generator; hash a seed tensor instead")
    if name in _NEW_ADDRESS:
        raise _refusal(func, "it gives a tensor another shape or address")
    if name == "aten::lift_fresh" and args[0].dim() > 0:
        raise _refusal(func, "it makes a tensor from host data; make it before the capture")
    devices = {t.device.type for t in args if isinstance(t, torch.Tensor)}
    target = kwargs.get("device")
    if target is not None:
        devices.add(torch.device(target).type)
    if devices - {"cpu"}:
        raise _refusal(func, f"it moves data between devices ({', '.join(sorted(devices))})")


def _draws_nothing(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Fused attention carries the tag because of its dropout, which may be off."""
    for index, argument in enumerate(func._schema.arguments):
        if argument.name == "dropout_p":
            value = args[index] if index < len(args) else argument.default_value
            return bool(kwargs.get("dropout_p", value) == 0.0)
    return False


def _refusal(func: Any, reason: str) -> CaptureError:
    return CaptureError(_text(str(func), reason))


def _text(op: str, reason: str) -> str:
    return f"{op} cannot be in a graph: {reason}; called at {_call_site()}"


def _call_site() -> str:
    """The innermost line that is neither torch's nor this file's."""
    for frame in reversed(traceback.extract_stack(sys._getframe())):
        if not frame.filename.startswith(_TORCH_FOLDER) and frame.filename != __file__:
            return f"{frame.filename}:{frame.lineno}: {frame.line}"
    return "an unknown line"


def _holds_tensor(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(isinstance(item, torch.Tensor) for item in value)
    return isinstance(value, torch.Tensor)


def _as_list(*items: Any) -> list[Any]:
    return list(items)


def _call_with_names(func: Callable[..., Any], names: tuple[str, ...], *values: Any) -> Any:
    split = len(values) - len(names)
    return func(*values[:split], **dict(zip(names, values[split:], strict=True)))
