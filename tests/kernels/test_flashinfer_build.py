"""What FlashInfer needs is found, missed and named; its kernels are built once. Without FlashInfer:
stand-ins take the place of its package and tools."""

from __future__ import annotations

import logging
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from duograph.kernels.attention import flashinfer_jit, flashinfer_tools
from duograph.kernels.attention.flashinfer_jit import FlashInferUnavailable, Kernel
from duograph.kernels.attention.flashinfer_tools import (
    BuildTools,
    built_kernels,
    cache_folder,
    find_tools,
)

CUDA = torch.device("cuda")
FA3 = Kernel("fa3", torch.bfloat16, 64)


def tool(folder: Path, name: str) -> str:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return str(path)


@dataclass
class Spec:
    """FlashInfer's description of one module."""

    is_aot: bool = False
    is_compiled: bool = False
    name: str = "module"
    error: str | None = None
    builds: list[bool] = field(default_factory=list)

    def build(self, *, verbose: bool) -> None:
        self.builds.append(verbose)
        if self.error is not None:
            raise RuntimeError(self.error)
        self.is_compiled = True


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Spec:
    """A package that imports and tools that are there."""
    spec = Spec()
    monkeypatch.setattr(flashinfer_jit, "load_package", lambda device: None)
    monkeypatch.setattr(flashinfer_jit, "_spec", lambda kernel: spec)
    tools = BuildTools(ninja="/bin/ninja", nvcc="/bin/nvcc", cxx="/bin/c++")
    monkeypatch.setattr(flashinfer_jit, "find_tools", lambda environ: tools)
    monkeypatch.setenv("PATH", "/bin")
    return spec


def test_tools_are_found_as_flashinfer_finds_them(tmp_path: Path) -> None:
    ninja, cxx = tool(tmp_path, "bin/ninja"), tool(tmp_path, "bin/g++-13")
    nvcc = tool(tmp_path, "cuda/bin/nvcc")
    environ = {"PATH": str(tmp_path / "bin"), "CUDA_HOME": str(tmp_path / "cuda"), "CXX": "g++-13"}
    assert find_tools(environ) == BuildTools(ninja=ninja, nvcc=nvcc, cxx=cxx)


def test_ninja_beside_this_python_is_found_without_an_activated_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ninja = tool(tmp_path, "venv/bin/ninja")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "venv/bin/python"))
    assert find_tools({"PATH": str(tmp_path)}).ninja == ninja


def test_what_is_missing_depends_on_what_is_to_be_done(tmp_path: Path) -> None:
    environ = {"PATH": str(tmp_path), "CUDA_HOME": str(tmp_path)}
    tools = BuildTools(ninja="/bin/ninja", nvcc=None, cxx=find_tools(environ).cxx)
    assert tools.missing() == ["nvcc", "c++"]
    assert tools.missing(to_compile=False) == []


def test_the_cache_lies_where_the_variable_says(tmp_path: Path) -> None:
    environ = {"FLASHINFER_WORKSPACE_BASE": str(tmp_path)}
    assert built_kernels(environ) == []
    tool(cache_folder(environ), "0.6.14/90a/cached_ops/some_kernel/some_kernel.so")
    assert built_kernels(environ) == ["some_kernel"]


def test_a_kernel_is_announced_and_built_once(
    package: Spec, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", "/there")
    progress: list[tuple[int, int]] = []
    with caplog.at_level(logging.INFO):
        flashinfer_jit.build([FA3, FA3], CUDA, lambda done, total: progress.append((done, total)))
    first = caplog.records[0].getMessage()
    assert first.startswith("building FlashInfer kernels (prefill fa3 head_dim 64), about ")
    assert first.endswith("cached in /there/.cache/flashinfer")
    assert package.builds == [False] and progress == [(0, 1), (1, 1)]
    caplog.clear()
    progress.clear()
    with caplog.at_level(logging.INFO):
        flashinfer_jit.build([FA3], CUDA, lambda done, total: progress.append((done, total)))
    assert not caplog.records and not progress  # up to date: not a word


def test_kernels_that_came_with_a_package_need_no_tool(
    package: Spec, monkeypatch: pytest.MonkeyPatch
) -> None:
    package.is_aot = package.is_compiled = True
    nothing = BuildTools(ninja=None, nvcc=None, cxx=None)
    monkeypatch.setattr(flashinfer_jit, "find_tools", lambda environ: nothing)
    flashinfer_jit.build([FA3], CUDA)
    assert package.builds == []


def test_missing_tools_are_named_before_anything_runs(
    package: Spec, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools = BuildTools(ninja=None, nvcc=None, cxx="/bin/c++")
    monkeypatch.setattr(flashinfer_jit, "find_tools", lambda environ: tools)
    with pytest.raises(FlashInferUnavailable, match="finds no ninja, no nvcc"):
        flashinfer_jit.build([FA3], CUDA)
    assert package.builds == []


@pytest.mark.parametrize(
    "reason",
    ["x.cu(3): error: no type", "/usr/bin/ld: cannot find -lcudart: No such file or directory"],
)
def test_a_failed_build_is_told_by_its_first_error(package: Spec, reason: str) -> None:
    command = "[1/2] nvcc -DNO_error: " + "-DFLAG " * 60
    package.error = f"Ninja build failed. Ninja output:\n{command}\n{reason}\nerror: exit 1"
    with pytest.raises(FlashInferUnavailable) as caught:
        flashinfer_jit.build([FA3], CUDA)
    expected = f"FlashInfer kernels (prefill fa3 head_dim 64) cannot be built: {reason}"
    assert str(caught.value) == expected


def test_ninja_off_the_path_is_put_on_it(package: Spec, monkeypatch: pytest.MonkeyPatch) -> None:
    tools = BuildTools(ninja="/venv/bin/ninja", nvcc="/bin/nvcc", cxx="/bin/c++")
    monkeypatch.setattr(flashinfer_jit, "find_tools", lambda environ: tools)
    flashinfer_jit.build([FA3], CUDA)
    assert os.environ["PATH"].split(os.pathsep) == ["/bin", "/venv/bin"]


def test_a_package_that_is_not_there_is_named_with_its_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(flashinfer_tools, "is_installed", lambda: False)
    with pytest.raises(FlashInferUnavailable, match=r"flashinfer-python is not .*duograph\[cuda\]"):
        flashinfer_jit.load_package(CUDA)


def test_a_package_that_cannot_be_imported_is_a_reason_and_no_crash(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(flashinfer_tools, "is_installed", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    for name in ("CUDA_ARCH_LIST", "USE_CUDA_NORM", "LOGGING_LEVEL"):
        monkeypatch.setenv(f"FLASHINFER_{name}", "")  # put back afterwards
        monkeypatch.delenv(f"FLASHINFER_{name}")
    with pytest.raises(FlashInferUnavailable, match="cannot be imported"):
        flashinfer_jit.load_package(CUDA)
    assert os.environ["FLASHINFER_CUDA_ARCH_LIST"] == "9.0a"


@pytest.mark.parametrize(("group", "kind"), [(1, "decode"), (3, "decode"), (4, "fa2"), (8, "fa2")])
def test_decode_takes_tensor_cores_where_the_group_fills_them(group: int, kind: str) -> None:
    assert flashinfer_jit.decode_kind(group) == kind
