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

from duograph.runners.config import MODEL_GROUP, GraphConfig, RunnerConfig
from duograph.scheduler.config import SchedulerConfig
from duograph.server.config import HttpConfig
from duograph.server.options import (
    ENV_PREFIX,
    Option,
    UsageError,
    convert,
    did_you_mean,
    options_of,
)

# Spellings of other servers and releases -> ours. Each use prints one line.
ALIASES = {
    "max-model-len": "context-length",
    "max-num-seqs": "max-running-requests",
    "max-num-batched-tokens": "chunked-prefill-size",
    "scheduling-policy": "schedule-policy",
    "cuda-graph-max-bs-decode": "cuda-graph-max-bs",
    "max-cudagraph-capture-size": "cuda-graph-max-bs",
    "cuda-graph-bs-decode": "cuda-graph-bs",
    "cudagraph-capture-sizes": "cuda-graph-bs",
    "disable-decode-cuda-graph": "disable-cuda-graph",
    "cuda-graph-max-bs-prefill": "piecewise-cuda-graph-max-tokens",
    "cuda-graph-bs-prefill": "piecewise-cuda-graph-tokens",
    "disable-prefill-cuda-graph": "disable-piecewise-cuda-graph",
}
SILENT_ALIASES = {"model": "model-path"}


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
        SystemExit: ``--help`` was given.
    """
    known = options()
    notes: list[str] = []
    given = _parse_command_line(_normalised(arguments, notes), known)
    config_file = given.pop("config", None) or environ.get(ENV_PREFIX + "CONFIG")
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    if config_file:
        _merge(values, origins, _from_file(Path(config_file), known))
    _merge(values, origins, _from_environment(environ, known))
    _merge(values, origins, _from_command_line(given, known))
    notes.extend(_misspelt_variables(environ, known))
    return _build(values, origins, tuple(notes))


def _normalised(arguments: Sequence[str], notes: list[str]) -> list[str]:
    """Underscores become dashes and aliases our own spelling, in flags only."""
    result: list[str] = []
    for position, argument in enumerate(arguments):
        if argument == "--":
            return [*result, *arguments[position:]]
        if not argument.startswith("--"):
            result.append(argument)
            continue
        name, equals, value = argument[2:].partition("=")
        name = name.replace("_", "-")
        if name in ALIASES:
            notes.append(f"--{name} is an alias of --{ALIASES[name]}")
        if name == "enforce-eager":
            notes.append(
                "--enforce-eager is an alias of --disable-cuda-graph --disable-piecewise-cuda-graph"
            )
            result += ["--disable-cuda-graph", "--disable-piecewise-cuda-graph"]
            continue
        name = ALIASES.get(name, SILENT_ALIASES.get(name, name))
        result.append(f"--{name}{equals}{value}")
    return result


def build_parser(known: Sequence[Option]) -> argparse.ArgumentParser:
    """Help and syntax only: values stay text and defaults are left out, because the
    environment and the file come in between."""
    parser = _Parser(
        prog="duograph serve",
        description="Serves one model over the OpenAI API.",
        epilog="Every flag can be set by the variable in brackets or by a key of the --config "
        "file; --no-FLAG turns a switch off again. Underscores may stand for dashes.",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
        usage="%(prog)s [MODEL] [flags]",
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=34),
    )
    parser.add_argument("model", nargs="?", metavar="MODEL", help="the same as --model-path")
    parser.add_argument(
        "--config", metavar="FILE", help="YAML or TOML file with flags as keys [DUOGRAPH_CONFIG]"
    )
    titles = [MODEL_GROUP]
    titles += [o.metadata["group"] for o in known if o.metadata["group"] != MODEL_GROUP]
    groups = {title: parser.add_argument_group(title) for title in dict.fromkeys(titles)}
    for option in known:
        group = groups[option.metadata["group"]]
        if option.kind is bool:
            group.add_argument(f"--{option.flag}", action="store_true", help=_help(option))
            group.add_argument(
                f"--no-{option.flag}",
                dest=option.flag.replace("-", "_"),
                action="store_false",
                help=argparse.SUPPRESS,
            )
        else:
            group.add_argument(
                f"--{option.flag}",
                nargs="+" if option.is_list else None,
                metavar=_metavar(option),
                help=_help(option),
            )
    return parser


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> typing.NoReturn:
        raise UsageError(message)


def _help(option: Option) -> str:
    meta = option.metadata
    parts = [meta["help"]]
    if option.default not in (None, (), "", False):
        parts.append(f"(default {option.default})")
    parts.append(f"[{option.env}]")
    return " ".join(parts).replace("%", "%%")


def _metavar(option: Option) -> str:
    if option.metadata["choices"]:
        return "{" + ",".join(option.metadata["choices"]) + "}"
    if option.metadata["metavar"]:
        return str(option.metadata["metavar"])
    return {int: "N", float: "X", str: "TEXT"}[option.kind]


def _parse_command_line(arguments: Sequence[str], known: Sequence[Option]) -> dict[str, Any]:
    parser = build_parser(known)
    namespace, unknown = parser.parse_known_args(arguments)
    for argument in unknown:
        if argument.startswith("-"):
            name = argument.partition("=")[0]
            flags = [f"--{option.flag}" for option in known] + ["--config", "--help"]
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
        content = tomllib.loads(text) if path.suffix == ".toml" else yaml.safe_load(text)
    except (yaml.YAMLError, tomllib.TOMLDecodeError) as error:
        reason = " ".join(str(error).split())
        raise UsageError(f"--config: {path} cannot be parsed: {reason}") from error
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
        if value is not None:
            origin = f"{key} in {path}"
            found[option.name] = (convert(option, value, origin), origin)
    return found


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
