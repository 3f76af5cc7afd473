"""``duograph check-env`` on FlashInfer: what it says about its package, tools and kernels."""

from __future__ import annotations

from pathlib import Path

import pytest

from duograph.kernels.attention.flashinfer_tools import BuildTools, cache_folder
from duograph.server import check_env
from duograph.server.artifact_cache import FOLDER, artifact_environment
from duograph.server.model_cache import cache_root

ALL = BuildTools(ninja="/bin/ninja", nvcc="/bin/nvcc", cxx="/bin/c++")


@pytest.fixture
def environ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    monkeypatch.setattr(check_env, "is_installed", lambda: True)
    monkeypatch.setattr(check_env, "find_tools", lambda environ: ALL)
    return {"XDG_CACHE_HOME": str(tmp_path)}


def said(environ: dict[str, str]) -> list[tuple[str, str]]:
    return [(found.level, found.text) for found in check_env._flashinfer_kernels(environ)]


def test_kernels_that_are_there_are_counted(environ: dict[str, str]) -> None:
    engine = artifact_environment(cache_root(environ) / FOLDER, environ)
    kernel = cache_folder(engine) / "0.6.14/90a/cached_ops/one/one.so"
    kernel.parent.mkdir(parents=True)
    kernel.touch()
    assert said(environ) == [("ok", f"1 built, in {cache_folder(engine)}")]


def test_a_first_start_is_told_what_it_will_build(environ: dict[str, str]) -> None:
    [(level, text)] = said(environ)
    assert level == "ok" and text.startswith("none built yet; a start that needs one builds it")


def test_missing_tools_are_named_with_what_follows(
    environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tools = BuildTools(ninja=None, nvcc=None, cxx="/bin/c++")
    monkeypatch.setattr(check_env, "find_tools", lambda environ: tools)
    assert said(environ) == [
        ("warn", "none built, and they cannot be without ninja, nvcc: auto uses Triton")
    ]


def test_without_the_package_there_is_nothing_to_say(
    environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check_env, "is_installed", lambda: False)
    assert said(environ) == []
