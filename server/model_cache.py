"""The folder of converted models: made once, under a lock, complete or not there at all.

Runs in the supervisor, so it imports no torch: conversion is a child process.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from duograph.server.child import die_with_parent

Say = Callable[[str], None]

# Part of the name of every converted folder: raise it when the converter writes something else.
CONVERSION_VERSION = 1
PARTIAL = ".partial-"


class ModelError(Exception):
    """The model cannot be found, fetched or converted. One sentence for the user."""


def cache_root(environ: Mapping[str, str]) -> Path:
    """Our folder below the user's cache folder, made with mode 0700.

    Raises:
        ModelError: it cannot be made, or others own it or may write to it: what lies there
            becomes weights and compiled code.
    """
    base = environ.get("XDG_CACHE_HOME", "")
    try:
        root = (Path(base) if base.startswith("/") else Path.home() / ".cache") / "duograph"
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = root.stat()
    except (OSError, RuntimeError) as error:
        raise ModelError(
            f"no cache folder can be made ({error}); set XDG_CACHE_HOME to a writable folder"
        ) from error
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise ModelError(f"the cache folder {root} must be yours and writable by you alone")
    return root


def build_once(target: Path, build: Callable[[Path], None], say: Say) -> Path:
    """``target``, which ``build`` fills if it does not exist yet.

    Two concurrent starts build once: the second waits. ``build`` makes the folder that it is
    given, which is renamed when complete, so an interrupted build leaves no half model. Beside
    that folder it may use its parent as a scratch folder.
    """
    if target.is_dir():
        return target
    try:
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _lock(target.parent / f".{target.name}.lock", say):
            if target.is_dir():
                return target
            for stale in target.parent.glob(f"{PARTIAL}{target.name}-*"):
                shutil.rmtree(stale, ignore_errors=True)
            partial = tempfile.mkdtemp(prefix=f"{PARTIAL}{target.name}-", dir=target.parent)
            try:
                folder = Path(partial) / "model"
                build(folder)
                folder.rename(target)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        raise ModelError(f"the model cache {target.parent} cannot be written: {error}") from error
    return target


@contextlib.contextmanager
def _lock(path: Path, say: Say) -> Iterator[None]:
    with open(path, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("Another process prepares this model; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def convert_gguf(source: Path, folder: Path) -> None:
    """Makes ``folder`` with config.json, model.safetensors and the tokenizer of ``source``.
    Raises ModelError with the converter's last line."""
    command = [sys.executable, "-m", "duograph.runners.models.gguf", str(source), str(folder)]
    result = run_tool(command)
    if result.returncode != 0:
        raise ModelError(f"{source} cannot be converted: {last_line(result.stderr)}")
    if not (folder / "config.json").is_file():
        raise ModelError(f"{source} cannot be converted: the converter wrote no config.json")


def run_tool(command: list[str]) -> subprocess.CompletedProcess[str]:
    """Runs another program to its end; it is killed when this process dies."""
    return subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        preexec_fn=die_with_parent,
    )


def last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:500] if lines else "it gave no reason"
