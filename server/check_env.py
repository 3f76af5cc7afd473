"""``duograph check-env``: one line for each thing a server needs, and what to do if it is not
there. Looks and never changes anything. Torch is asked in a child process, so that a broken
installation is one line here and not a crash."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from duograph.kernels.attention.flashinfer_tools import (
    built_kernels,
    cache_folder,
    find_tools,
    is_installed,
)
from duograph.scheduler.exit_codes import ExitCode
from duograph.server.artifact_cache import FOLDER, artifact_environment
from duograph.server.cli import installed_version
from duograph.server.model_cache import ModelError, cache_root
from duograph.server.run_folder import parent_folder

_TORCH_PROBE = """
import json, torch
gpus = []
for index in range(torch.cuda.device_count()):
    gpu = torch.cuda.get_device_properties(index)
    gpus.append([gpu.name, round(gpu.total_memory / 2**30, 1), f"{gpu.major}.{gpu.minor}"])
print(json.dumps({"torch": torch.__version__, "cuda": torch.version.cuda, "gpus": gpus}))
"""
_TOOL_TIMEOUT_S = 120
_GIB = 2**30


@dataclass(frozen=True)
class Finding:
    level: str  # "ok", "warn": works with less, "fail": cannot serve
    subject: str
    text: str


def report(environ: Mapping[str, str]) -> ExitCode:
    """Prints every finding; USAGE if one of them stops the server from working."""
    worst = ExitCode.OK
    for finding in findings(environ):
        print(f"{finding.level:5}{finding.subject:18}{finding.text}")
        if finding.level == "fail":
            worst = ExitCode.USAGE
    return worst


def findings(environ: Mapping[str, str]) -> Iterator[Finding]:
    yield Finding("ok", "python", f"{platform.python_version()} ({sys.executable})")
    yield Finding("ok", "system", f"{platform.system()} {platform.release()}")
    yield from _torch()
    yield from _gpu_tools(environ)
    yield from _packages(environ)
    yield from _folders(environ)
    yield from _limits()


def _torch() -> Iterator[Finding]:
    answer = _output([sys.executable, "-c", _TORCH_PROBE])
    if answer is None:
        yield Finding("fail", "torch", "cannot be imported; reinstall it")
        return
    facts = json.loads(answer.splitlines()[-1])
    built = f"built for CUDA {facts['cuda']}" if facts["cuda"] else "built for CPU only"
    yield Finding("ok", "torch", f"{facts['torch']}, {built}")
    if not facts["gpus"]:
        yield Finding("warn", "gpu", "none that torch can use; models run on the CPU")
    for name, memory, capability in facts["gpus"]:
        yield Finding("ok", "gpu", f"{name}, {memory} GiB, compute capability {capability}")


def _gpu_tools(environ: Mapping[str, str]) -> Iterator[Finding]:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = _output(query)
    if driver is None:
        yield Finding("warn", "driver", "no nvidia-smi")
    else:
        yield Finding("ok", "driver", driver.splitlines()[0])
    tools = find_tools(environ)
    for tool, path in (("nvcc", tools.nvcc), ("ninja", tools.ninja), ("c++", tools.cxx)):
        if path is None:
            yield Finding("warn", tool, "not found; only FlashInfer needs it, to build its kernels")
        else:
            yield Finding("ok", tool, path)
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        yield Finding("warn", "C compiler", "not found; Triton and Inductor need one on a GPU")
    else:
        yield Finding("ok", "C compiler", compiler)


def _packages(environ: Mapping[str, str]) -> Iterator[Finding]:
    for name, without in (
        ("triton", "needed for attention on a GPU"),
        ("flashinfer-python", "optional: pip install 'duograph[cuda]'"),
    ):
        version = installed_version(name)
        level = "ok" if version else "warn"
        yield Finding(level, name, version or f"not installed; {without}")
    yield from _flashinfer_kernels(environ)
    for name in ("transformers", "tokenizers", "fastapi", "uvicorn", "uvloop", "pyzmq", "msgspec"):
        version = installed_version(name)
        yield Finding("ok" if version else "fail", name, version or "not installed")
    if importlib.util.find_spec("pip") is None:
        yield Finding("warn", "pip", "none here; the default model cannot be fetched")


def _flashinfer_kernels(environ: Mapping[str, str]) -> Iterator[Finding]:
    """What the first start with FlashInfer would have to build."""
    if not is_installed():
        return
    try:
        engine = {**environ, **artifact_environment(cache_root(environ) / FOLDER, environ)}
    except ModelError:
        return  # _folders() tells of it
    found = built_kernels(engine)
    where = cache_folder(engine)
    if found:
        yield Finding("ok", "kernel cache", f"{len(found)} built, in {where}")
        return
    missing = find_tools(environ).missing()
    if missing:
        text = f"none built, and they cannot be without {', '.join(missing)}: auto uses Triton"
        yield Finding("warn", "kernel cache", text)
    else:
        text = f"none built yet; a start that needs one builds it in {where}, in a minute or two"
        yield Finding("ok", "kernel cache", text)


def _folders(environ: Mapping[str, str]) -> Iterator[Finding]:
    try:
        root = cache_root(environ)
        free = psutil.disk_usage(str(root)).free / _GIB
        level = "ok" if free > 1 else "warn"
        yield Finding(level, "model cache", f"{root}, {free:.1f} GiB free")
        models = root / "models"
        names = (
            sorted(p.name for p in models.iterdir() if p.name[0] != ".") if models.is_dir() else []
        )
        yield Finding("ok", "cached models", ", ".join(names) or "none yet")
    except ModelError as error:
        yield Finding("fail", "model cache", str(error))
    try:
        yield Finding("ok", "run folder", f"below {parent_folder(environ)}")
    except OSError as error:
        yield Finding("fail", "run folder", str(error))
    for variable in ("HF_HOME", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):
        if variable in environ:
            usable = os.access(Path(environ[variable]), os.W_OK)
            text = environ[variable] if usable else f"{environ[variable]} cannot be written"
            yield Finding("ok" if usable else "warn", variable, text)


def _limits() -> Iterator[Finding]:
    cores = len(os.sched_getaffinity(0))
    memory = psutil.virtual_memory()
    yield Finding("ok", "cores", f"{cores} usable of {os.cpu_count()}")
    level = "ok" if memory.available > 2 * _GIB else "warn"
    text = f"{memory.available / _GIB:.1f} of {memory.total / _GIB:.1f} GiB free"
    yield Finding(level, "memory", text)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = hard == resource.RLIM_INFINITY or hard >= 4096
    text = "unlimited" if hard == resource.RLIM_INFINITY else str(hard)
    hint = "" if enough else "; 4096 are needed for 1,024 connections (ulimit -Hn)"
    yield Finding("ok" if enough else "warn", "open files", text + hint)


def _output(command: list[str]) -> str | None:
    """What a tool prints; None if it is not there, fails or hangs."""
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=_TOOL_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() or None if result.returncode == 0 else None
