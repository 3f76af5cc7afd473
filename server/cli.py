"""The ``duograph`` command: picks the subcommand and turns failures into one line and an exit
code. Torch and the HTTP framework are loaded by no command that does not need them."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from collections.abc import Callable, Sequence

from duograph.scheduler.exit_codes import ExitCode
from duograph.server.args import parse_serve
from duograph.server.options import UsageError, did_you_mean

USAGE = """usage: duograph COMMAND ...

commands:
  serve [MODEL] [flags]   serve a model over the OpenAI API (duograph serve --help)
  plan [MODEL] [flags]    capture sizes and predicted memory for a card, without one
  bench KIND [flags]      measure: duograph bench --help lists the kinds
  fetch-model [MODEL]     fetch and convert a model (the default one if left out), print its folder
  check-env               what this machine has, and what is missing
  version                 versions of everything that matters
"""

PRINT_CONFIG = ("--print-config", "--print_config")

VERSIONS_OF = (
    "duograph",
    "torch",
    "triton",
    "flashinfer-python",
    "transformers",
    "tokenizers",
    "safetensors",
    "gguf",
    "fastapi",
    "starlette",
    "uvicorn",
    "uvloop",
    "pyzmq",
    "msgspec",
    "numpy",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] in ("-h", "--help", "help"):
        print(USAGE, end="")
        return ExitCode.OK if words else ExitCode.USAGE
    commands: dict[str, Callable[[list[str]], int]] = {
        "serve": _serve,
        "plan": _plan,
        "bench": _bench,
        "fetch-model": _fetch_model,
        "check-env": _check_env,
        "version": _version,
        "--version": _version,
    }
    command = commands.get(words[0])
    try:
        if command is None:
            hint = did_you_mean(words[0], [name for name in commands if name[0] != "-"])
            raise UsageError(f"unknown command {words[0]!r}{hint}; duograph --help lists them")
        return command(words[1:])
    except UsageError as error:
        print(f"duograph: error: {error}", file=sys.stderr)
        return ExitCode.USAGE


def _serve(arguments: list[str]) -> int:
    words = [word for word in arguments if word not in PRINT_CONFIG]
    config = parse_serve(words, os.environ)
    if len(words) < len(arguments):
        from duograph.server.arg_checks import check_together
        from duograph.server.print_config import config_text

        for line in (*config.notes, *check_together(config)):
            print(f"# {line}", file=sys.stderr)
        print(config_text(config), end="")
        return ExitCode.OK
    from duograph.server.launch import serve

    return serve(config, os.environ)


def _plan(arguments: list[str]) -> int:
    from duograph.server.plan import main as plan

    return plan(arguments, os.environ)


def _bench(arguments: list[str]) -> int:
    from duograph.server.bench import main as bench

    return bench(arguments)


def _fetch_model(arguments: list[str]) -> int:
    if any(word.startswith("-") for word in arguments) or len(arguments) > 1:
        print("usage: duograph fetch-model [MODEL]", file=sys.stderr)
        return ExitCode.OK if arguments in (["-h"], ["--help"]) else ExitCode.USAGE
    from duograph.server.model_cache import ModelError
    from duograph.server.model_store import resolve_model

    def say(line: str) -> None:
        print(line, file=sys.stderr)

    try:
        model = resolve_model(arguments[0] if arguments else "", "auto", os.environ, say)
    except ModelError as error:
        print(f"duograph: error: {error}", file=sys.stderr)
        return ExitCode.MODEL
    print(model.folder)
    return ExitCode.OK


def _check_env(arguments: list[str]) -> int:
    _no_arguments("check-env", arguments)
    from duograph.server.check_env import report

    return report(os.environ)


def _version(arguments: list[str]) -> int:
    _no_arguments("version", arguments)
    print(f"{'python':18} {platform.python_version()}")
    for name in VERSIONS_OF:
        print(f"{name:18} {installed_version(name) or 'not installed'}")
    return ExitCode.OK


def installed_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _no_arguments(command: str, arguments: list[str]) -> None:
    if arguments:
        raise UsageError(f"duograph {command} takes no arguments, got {arguments[0]!r}")
