"""What FlashInfer needs beside itself to build kernels, and what it has built already.

FlashInfer compiles each kernel at its first use with ninja, nvcc and a C++ compiler and keeps it
in a folder. Here it is only looked at: neither FlashInfer nor torch is imported, so the
supervisor may ask, too.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

PACKAGE = "flashinfer-python"
INSTALL = "pip install 'duograph[cuda]'"


@dataclass(frozen=True, slots=True)
class BuildTools:
    """Paths of the tools; None where there is none."""

    ninja: str | None
    nvcc: str | None
    cxx: str | None

    def missing(self, *, to_compile: bool = True) -> list[str]:
        """Names of the tools that are not there. ninja is asked at every start whether a kernel
        is up to date; the compilers are only needed ``to_compile`` one."""
        needed = {"ninja": self.ninja}
        if to_compile:
            needed |= {"nvcc": self.nvcc, "c++": self.cxx}
        return [name for name, path in needed.items() if path is None]


def is_installed() -> bool:
    """Whether there is a FlashInfer package; importing it may fail all the same."""
    return importlib.util.find_spec("flashinfer") is not None


def find_tools(environ: Mapping[str, str]) -> BuildTools:
    """The tools that FlashInfer would run, found as it finds them: ninja on PATH (or beside this
    Python, where pip puts it), nvcc from FLASHINFER_NVCC, CUDA_HOME, PATH or /usr/local/cuda,
    the C++ compiler from CXX."""
    path = environ.get("PATH")
    beside = str(Path(sys.executable).parent)
    return BuildTools(
        ninja=shutil.which("ninja", path=path) or shutil.which("ninja", path=beside),
        nvcc=_find_nvcc(environ, path),
        cxx=shutil.which(environ.get("CXX") or "c++", path=path),
    )


def _find_nvcc(environ: Mapping[str, str], path: str | None) -> str | None:
    if environ.get("FLASHINFER_NVCC"):
        return shutil.which(environ["FLASHINFER_NVCC"], path=path)
    home = environ.get("CUDA_HOME") or environ.get("CUDA_PATH")
    if home:
        return shutil.which("nvcc", path=os.path.join(home, "bin"))
    return shutil.which("nvcc", path=path) or shutil.which("nvcc", path="/usr/local/cuda/bin")


def cache_folder(environ: Mapping[str, str]) -> Path:
    """Where FlashInfer keeps what it has built, for all versions and cards."""
    base = environ.get("FLASHINFER_WORKSPACE_BASE") or str(Path.home())
    return Path(base) / ".cache" / "flashinfer"


def built_kernels(environ: Mapping[str, str]) -> list[str]:
    """Names of the kernels in the cache, of all versions and cards."""
    found = cache_folder(environ).glob("*/*/cached_ops/*/*.so")
    return sorted(path.stem for path in found)
