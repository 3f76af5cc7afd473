"""A configuration field as a flag: its names, its type, and the conversion of text to it.

Shared by the command line, the environment and the configuration file, so that all three
accept the same values and refuse the same mistakes. It does not know what any flag means.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

ENV_PREFIX = "DUOGRAPH_"
# Kubernetes injects <SERVICE>_PORT=tcp://... for every service, so a service that is called
# duograph would set the plain name.
ENV_NAMES = {"port": "DUOGRAPH_HTTP_PORT"}

# no count of anything here is larger, and no array is made for a slip of the keyboard
MAX_INT = 2**31 - 1

_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off")


class UsageError(Exception):
    """The command line, the environment or the configuration file is wrong. The text is one
    sentence that names the flag, variable or key."""


@dataclass(frozen=True)
class Option:
    """One configuration field as the command line sees it."""

    name: str  # of the field
    owner: type
    kind: type  # bool, int, float or str
    is_list: bool
    default: Any
    metadata: Mapping[str, Any]

    @property
    def flag(self) -> str:
        return str(self.metadata["flag"] or self.name.replace("_", "-"))

    @property
    def env(self) -> str:
        return ENV_NAMES.get(self.name, ENV_PREFIX + self.flag.replace("-", "_").upper())


def options_of(owner: type) -> Iterator[Option]:
    hints = typing.get_type_hints(owner)
    for field in dataclasses.fields(owner):
        if "group" not in field.metadata:
            continue  # a nested config, whose fields are listed by themselves
        hint = hints[field.name]
        if isinstance(hint, types.UnionType):  # None = choose for me
            hint = next(arm for arm in typing.get_args(hint) if arm is not type(None))
        is_list = typing.get_origin(hint) is tuple
        kind = typing.get_args(hint)[0] if is_list else hint
        yield Option(field.name, owner, kind, is_list, field.default, field.metadata)


def did_you_mean(word: str, known: Sequence[str]) -> str:
    """`` (did you mean X?)``, or nothing if no known word is close."""
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return f" (did you mean {close[0]}?)" if close else ""


def convert(option: Option, raw: Any, origin: str) -> Any:
    """``raw`` is text, a list of texts, or a value of a file. Raises UsageError."""
    if not option.is_list:
        if isinstance(raw, list | dict):
            raise UsageError(f"{origin} takes one value, got {raw!r}")
        return _checked(option, _scalar(option, raw, origin), origin)
    items = raw if isinstance(raw, list) else [raw]
    parts: list[Any] = []
    for item in items:
        parts += item.replace(",", " ").split() if isinstance(item, str) else [item]
    if not parts:
        raise UsageError(f"{origin} needs at least one value")
    return tuple(_checked(option, _scalar(option, part, origin), origin) for part in parts)


def _scalar(option: Option, raw: Any, origin: str) -> Any:
    if option.kind is bool:
        word = str(raw).lower()
        if word not in _TRUE + _FALSE:
            raise UsageError(f"{origin} must be true or false, got {raw!r}")
        return word in _TRUE
    if option.kind is str:
        return str(raw)
    wanted = "a whole number" if option.kind is int else "a number"
    exact = (str, int) if option.kind is int else (str, int, float)
    try:
        if isinstance(raw, bool) or not isinstance(raw, exact):
            raise ValueError
        value = option.kind(raw)
    except ValueError:
        raise UsageError(f"{origin} must be {wanted}, got {raw!r}") from None
    if not math.isfinite(value):
        raise UsageError(f"{origin} must be finite, got {raw!r}")
    return value


def _checked(option: Option, value: Any, origin: str) -> Any:
    meta = option.metadata
    if meta["choices"] and value not in meta["choices"]:
        hint = did_you_mean(str(value), meta["choices"])
        raise UsageError(
            f"{origin} must be one of {', '.join(meta['choices'])}, got {value!r}{hint}"
        )
    low, high = meta["minimum"], meta["maximum"]
    if high is None and option.kind is int and value > MAX_INT:
        high = MAX_INT
    if (low is not None and value < low) or (high is not None and value > high):
        if low is None or high is None:
            bound = f"at least {low}" if high is None else f"at most {high}"
        else:
            bound = f"between {low} and {high}"
        raise UsageError(f"{origin} must be {bound}, got {value}")
    return value
