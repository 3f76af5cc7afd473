"""Typed, range-checked access to the JSON files of a model folder.

Knows how to name a file and a field in an error; knows no model.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

MAX_CONFIG_BYTES = 16 << 20  # real ones are a few kB; a longer one is not a config


class ModelError(ValueError):
    """A model folder or file that cannot be served. The message names file and field."""


class ConfigFile:
    """One JSON object and where it came from."""

    def __init__(self, path: Path, values: dict[str, Any], prefix: str = "") -> None:
        self.path = path
        self._values = values
        self._prefix = prefix

    @staticmethod
    def read(path: Path) -> ConfigFile:
        """Raises ModelError if ``path`` is missing, too long, or holds no JSON object."""
        if not path.is_file():
            raise ModelError(f"{path}: no such file")
        size = path.stat().st_size
        if size > MAX_CONFIG_BYTES:
            raise ModelError(f"{path}: {size} bytes is too long for a config file")
        try:
            values = json.loads(path.read_bytes())
        except (ValueError, RecursionError) as error:
            raise ModelError(f"{path}: not valid JSON: {error}") from error
        if not isinstance(values, dict):
            raise ModelError(f"{path}: must hold a JSON object")
        return ConfigFile(path, values)

    def error(self, field: str, problem: str) -> ModelError:
        return ModelError(f"{self.path}: {self._prefix}{field}: {problem}")

    def get(self, field: str, default: Any = None) -> Any:
        """The raw value; an explicit null counts as absent."""
        value = self._values.get(field)
        return default if value is None else value

    def names(self) -> list[str]:
        """The fields there are, in file order."""
        return list(self._values)

    def section(self, field: str) -> ConfigFile | None:
        """A nested object, or None if it is absent or empty."""
        value = self.get(field)
        if value is None or value == {}:
            return None
        if not isinstance(value, dict):
            raise self.error(field, f"must be an object, got {value!r}")
        return ConfigFile(self.path, value, prefix=f"{self._prefix}{field}.")

    def integer(self, field: str, *, low: int, high: int, default: int | None = None) -> int:
        """An integer in [low, high]. A missing field without default is an error."""
        value = self.get(field, default)
        if value is None:
            raise self.error(field, "is missing")
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(field, f"must be an integer, got {value!r}")
        if not low <= value <= high:
            raise self.error(field, f"must be in [{low}, {high}], got {value}")
        return value

    def number(self, field: str, *, low: float, high: float, default: float | None = None) -> float:
        """A finite number in [low, high]. A missing field without default is an error."""
        value = self.get(field, default)
        if value is None:
            raise self.error(field, "is missing")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(field, f"must be a number, got {value!r}")
        if not (math.isfinite(value) and low <= value <= high):
            raise self.error(field, f"must be in [{low}, {high}], got {value}")
        return float(value)

    def boolean(self, field: str, *, default: bool) -> bool:
        value = self.get(field, default)
        if not isinstance(value, bool):
            raise self.error(field, f"must be true or false, got {value!r}")
        return value

    def token_ids(self, field: str, vocab_size: int) -> tuple[int, ...]:
        """One id or a list of ids, each in [0, vocab_size)."""
        value = self.get(field)
        ids = value if isinstance(value, list) else [value]
        for token in ids:
            if isinstance(token, bool) or not isinstance(token, int):
                raise self.error(field, f"must be an integer or a list of them, got {value!r}")
            if not 0 <= token < vocab_size:
                raise self.error(field, f"{token} is not in [0, {vocab_size})")
        return tuple(ids)
