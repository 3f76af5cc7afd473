"""One real process tree with the default model, shared by all clients of other people.

A small model is not wise, so these tests look at form: what parses, what is counted, what comes
in which order. Structured output and required calls are enforced by grammar and have to parse.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from duograph.tests.e2e.server_process import ServerProcess

MODEL = "SmolLM2-135M-Instruct"
HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.slow)
            item.add_marker(pytest.mark.model)


@pytest.fixture(scope="session")
def smol(
    default_model_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    """What ``duograph serve`` starts; prefill without pieces, which take long to trace."""
    flags = ["--port", "0", "--cuda-graph-bs", "1", "2", "4", "--disable-piecewise-cuda-graph"]
    with ServerProcess(flags, tmp_path_factory.mktemp("clients")) as server:
        yield server.wait_ready()
        assert server.stop() == 0, server.log()
        server.assert_nothing_left()


@pytest.fixture
def base_url(smol: ServerProcess) -> str:
    return f"{smol.url}/v1"
