"""The command line, derived from the configuration dataclasses: one field = one flag, one
environment variable, one key of the configuration file.

Precedence: command line > environment > file > default. This file does not know what any flag
means; the few rules that join several flags are in ``arg_checks.py``.
"""

from __future__ import annotations

import argparse
import difflib
import tomllib
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from duograph.runners.config import GraphConfig, RunnerConfig
from duograph.scheduler.config import SchedulerConfig
from duograph.server.aliases import normalised
from duograph.server.config import HttpConfig
from duograph.server.help import help_text
from duograph.server.options import (
    ENV_PREFIX,
    Option,
    UsageError,
    convert,
    did_you_mean,
    options_of,
)


@dataclass(frozen=True)
class ServeConfig:
    """Everything that ``duograph serve`` was told. ``origins`` maps a field's name to where its
    value comes from: a flag, a variable or a file; defaults are not in it."""

    runner: RunnerConfig
    scheduler: SchedulerConfig
    http: HttpConfig
    origins: Mapping[str, str]
    notes: tuple[str, ...] = ()  # lines to print at start: aliases, flags without effect


def options() -> list[Option]:
    """Every flag of ``duograph serve``, in the order of the configuration files."""
    return [
        option
        for owner in (RunnerConfig, GraphConfig, SchedulerConfig, HttpConfig)
        for option in options_of(owner)
    ]


def parse_serve(arguments: Sequence[str], environ: Mapping[str, str]) -> ServeConfig:
    """The complete configuration.

    Raises:
        UsageError: an unknown flag, variable value or key, or a value out of range.
        SystemExit: help was asked for, and has been printed.
    """
    known = options()
    notes: list[str] = []
    for argument in arguments:
        if argument in ("-h", "--help") or argument.startswith("--help="):
            print(help_text(argument.partition("=")[2], known), end="")
            raise SystemExit(0)
    given = _parse_command_line(normalised(arguments, notes), known)
    config_file = given.pop("config", None) or environ.get(ENV_PREFIX + "CONFIG")
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    if config_file:
        _merge(values, origins, _from_file(Path(config_file), known))
    _merge(values, origins, _from_environment(environ, known))
    _merge(values, origins, _from_command_line(given, known))
    notes.extend(_misspelt_variables(environ, known))
    return _build(values, origins, tuple(notes))


def build_parser(known: Sequence[Option]) -> argparse.ArgumentParser:
    """Syntax only: values stay text and defaults are left out, because the environment and the
    file come in between. Help is help.py's."""
    parser = _Parser(argument_default=argparse.SUPPRESS, allow_abbrev=False, add_help=False)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--config")
    for option in known:
        if option.kind is bool:
            dest = option.flag.replace("-", "_")
            parser.add_argument(f"--{option.flag}", action="store_true")
            parser.add_argument(f"--no-{option.flag}", dest=dest, action="store_false")
        else:
            parser.add_argument(f"--{option.flag}", nargs="+" if option.is_list else None)
    return parser


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> typing.NoReturn:
        raise UsageError(message)


def _parse_command_line(arguments: Sequence[str], known: Sequence[Option]) -> dict[str, Any]:
    parser = build_parser(known)
    namespace, unknown = parser.parse_known_args(arguments)
    for argument in unknown:
        if argument.startswith("-"):
            name = argument.partition("=")[0]
            flags = [f"--{option.flag}" for option in known]
            flags += ["--config", "--help", "--print-config"]
            raise UsageError(f"unknown flag {name}{did_you_mean(name, flags)}")
    if unknown:
        raise UsageError(f"unexpected argument {unknown[0]!r}; one MODEL can be given")
    given = vars(namespace)
    model = given.pop("model", None)
    if model is not None:
        if "model_path" in given and given["model_path"] != model:
            raise UsageError("MODEL and --model-path are both given and differ")
        given["model_path"] = model
    return given


_Sourced = dict[str, tuple[Any, str]]  # field name -> value, where it comes from


def _merge(values: dict[str, Any], origins: dict[str, str], new: _Sourced) -> None:
    for name, (value, origin) in new.items():
        values[name] = value
        origins[name] = origin


def _from_command_line(given: Mapping[str, Any], known: Sequence[Option]) -> _Sourced:
    found: _Sourced = {}
    for option in known:
        raw = given.get(option.flag.replace("-", "_"))
        if raw is not None:
            flag = f"--{option.flag}"
            found[option.name] = (convert(option, raw, flag), flag)
    return found


def _from_environment(environ: Mapping[str, str], known: Sequence[Option]) -> _Sourced:
    return {
        option.name: (convert(option, environ[option.env], option.env), option.env)
        for option in known
        if environ.get(option.env, "") != ""
    }


def _misspelt_variables(environ: Mapping[str, str], known: Sequence[Option]) -> Iterator[str]:
    """Only near misses: the environment may hold foreign variables with our prefix, such as
    those that Kubernetes makes for a service."""
    names = [option.env for option in known] + [ENV_PREFIX + "CONFIG"]
    for name in sorted(environ):
        if name.startswith(ENV_PREFIX) and name not in names:
            close = difflib.get_close_matches(name, names, n=1, cutoff=0.85)
            if close:
                yield f"the variable {name} has no meaning (did you mean {close[0]}?)"


def _from_file(path: Path, known: Sequence[Option]) -> _Sourced:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise UsageError(f"--config: cannot read {path}: {reason}") from error
    try:
        content = tomllib.loads(text) if path.suffix == ".toml" else _of_yaml(text)
    except (yaml.YAMLError, tomllib.TOMLDecodeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise UsageError(f"--config: {path} cannot be parsed: {reason}") from error
    except RecursionError as error:
        raise UsageError(f"--config: {path} cannot be parsed: nested too deeply") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise UsageError(f"--config: {path} must hold a mapping of flags to values")
    by_key = {option.flag: option for option in known}
    by_key["model"] = by_key["model-path"]
    found: _Sourced = {}
    for key, value in content.items():
        option = by_key.get(str(key).replace("_", "-"))
        if option is None:
            hint = did_you_mean(str(key), list(by_key))
            raise UsageError(f"--config: {path} has the unknown key {key!r}{hint}")
        if option.name in found:
            raise UsageError(f"--config: {path} has {option.flag} twice, also as {key!r}")
        if value is not None:
            origin = f"{key} in {path}"
            found[option.name] = (convert(option, value, origin), origin)
    return found


def _of_yaml(text: str) -> Any:
    """Raises yaml.YAMLError, or ValueError for a key that is there twice: the library takes the
    last one."""
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    keys = [key.value for key, _ in root.value] if isinstance(root, yaml.MappingNode) else []
    for key in keys:
        if keys.count(key) > 1:
            raise ValueError(f"the key {key!r} is there twice")
    return yaml.safe_load(text)


def _build(values: dict[str, Any], origins: dict[str, str], notes: tuple[str, ...]) -> ServeConfig:
    def pick(owner: type) -> dict[str, Any]:
        return {o.name: values[o.name] for o in options_of(owner) if o.name in values}

    graph = GraphConfig(**pick(GraphConfig))
    return ServeConfig(
        runner=RunnerConfig(**pick(RunnerConfig), graph=graph),
        scheduler=SchedulerConfig(**pick(SchedulerConfig)),
        http=HttpConfig(**pick(HttpConfig)),
        origins=origins,
        notes=notes,
    )
