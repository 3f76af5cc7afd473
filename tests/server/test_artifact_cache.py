"""Where compiled code is kept, and that a second process finds it there."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from duograph.server.artifact_cache import FOLDER, artifact_environment, engine_environment

COMPILE = """
import torch
from torch._dynamo.utils import counters

@torch.compile(fullgraph=True)
def double_sine(x):
    return (x.sin() * 2).sum(dim=-1)

double_sine(torch.ones(64, 32))
hits = counters["inductor"]["fxgraph_cache_hit"]
print("HITS", hits + counters["aot_autograd"]["autograd_cache_hit"])
"""


def test_every_compiler_writes_below_the_one_folder(tmp_path: Path) -> None:
    names = artifact_environment(tmp_path, {})
    assert set(names) == {
        "TORCHINDUCTOR_CACHE_DIR",
        "TRITON_CACHE_DIR",
        "FLASHINFER_WORKSPACE_BASE",
    }
    assert all(Path(value).parent == tmp_path for value in names.values())
    assert len(set(names.values())) == 3


def test_what_the_user_has_set_wins(tmp_path: Path) -> None:
    environ = {"TRITON_CACHE_DIR": "/mine", "FLASHINFER_WORKSPACE_BASE": ""}
    names = artifact_environment(tmp_path, environ)
    assert "TRITON_CACHE_DIR" not in names
    assert names["FLASHINFER_WORKSPACE_BASE"] == str(tmp_path / "flashinfer")
    assert "TRITON_CACHE_DIR" not in artifact_environment(tmp_path, {"TRITON_HOME": "/mine"})


def test_the_engine_gets_them_beside_all_else(tmp_path: Path) -> None:
    environ = {"XDG_CACHE_HOME": str(tmp_path), "LANG": "C", "TRITON_CACHE_DIR": "/mine"}
    full = engine_environment(environ)
    assert environ.items() <= full.items()
    folder = tmp_path / "duograph" / FOLDER
    assert full["TORCHINDUCTOR_CACHE_DIR"] == str(folder / "inductor")
    assert folder.stat().st_mode & 0o777 == 0o700


def test_a_folder_that_others_may_write_to_is_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "duograph").mkdir()
    (tmp_path / "duograph").chmod(0o777)
    environ = {"XDG_CACHE_HOME": str(tmp_path)}
    with caplog.at_level(logging.WARNING):
        assert engine_environment(environ) == environ
    assert "writable by you alone" in caplog.text
    assert not (tmp_path / "duograph" / FOLDER).exists()


@pytest.mark.slow
def test_a_second_process_compiles_nothing(tmp_path: Path) -> None:
    """Inductor for the CPU: the first process fills the folder, the second adds no file."""
    # Inductor, once loaded, sets its variable itself: that is not the user's
    own = {name: value for name, value in os.environ.items() if not name.endswith("_CACHE_DIR")}
    environ = engine_environment({**own, "XDG_CACHE_HOME": str(tmp_path)})

    def compile_once() -> int:
        done = subprocess.run(
            [sys.executable, "-c", COMPILE],
            env=environ,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        return int(done.stdout.split("HITS ")[1])

    def objects() -> set[Path]:
        folder = tmp_path / "duograph" / FOLDER / "inductor"
        return {path for path in folder.rglob("*") if path.suffix in (".so", ".cpp", ".py")}

    assert compile_once() == 0
    first = objects()
    assert any(path.suffix == ".so" for path in first)
    assert compile_once() > 0
    assert objects() == first
