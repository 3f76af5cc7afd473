"""schemathesis over /openapi.json: the examples, every field at its bounds and beyond, and random
bodies. No 5xx, no status, content type or answer that the document does not have, nothing wrong
accepted, no route open without its key."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from duograph.tests.clients.conftest import HERE
from duograph.tests.e2e.server_process import ServerProcess

PROGRAM = Path(sys.executable).parent / "schemathesis"
KEY = "operator-key"
EXAMPLES = 30
PHASES = ("examples", "coverage", "fuzzing")


@pytest.fixture(scope="module")
def guarded(
    default_model_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    """With keys, so that the operator's routes are tried too. A short context, since lists are
    tried at their longest and a CPU reads some hundred tokens a second."""
    folder = tmp_path_factory.mktemp("schemathesis")
    flags = [
        "--port", "0", "--context-length", "256", "--cuda-graph-bs", "1", "2",
        "--disable-piecewise-cuda-graph", "--profile-dir", str(folder / "profiles"),
    ]  # fmt: skip
    keys = {"DUOGRAPH_API_KEY": "user-key", "DUOGRAPH_ADMIN_API_KEY": KEY}
    with ServerProcess(flags, folder, environ=keys) as server:
        yield server.wait_ready()
        assert server.stop() == 0, server.log()
        server.assert_nothing_left()


@pytest.mark.timeout(1500)
def test_nothing_that_it_sends_breaks_the_contract(guarded: ServerProcess, tmp_path: Path) -> None:
    for name in ("schemathesis.toml", "schemathesis_hooks.py"):  # it leaves files where it runs
        shutil.copy(HERE / name, tmp_path)
    done = subprocess.run(
        [str(PROGRAM), "--config-file", "schemathesis.toml", "run",
         f"{guarded.url}/openapi.json", "--phases", ",".join(PHASES),
         "--max-examples", str(EXAMPLES), "--seed", "1", "--no-shrink", "--workers", "1",
         "-H", f"Authorization: Bearer {KEY}"],
        cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=1400,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    for phase in PHASES:
        assert f"✅  {phase.capitalize()} (in" in done.stdout, done.stdout
    assert "Traceback" not in guarded.log()
