"""The openai npm package: node runs node/client.mjs, which tells what each call gave."""

from __future__ import annotations

import json
import shutil
import subprocess

import pytest

from duograph.tests.clients.conftest import HERE, MODEL

FOLDER = HERE / "node"


def test_every_call_of_the_npm_package_works(base_url: str) -> None:
    node = shutil.which("node")
    if node is None or not (FOLDER / "node_modules" / "openai").is_dir():
        pytest.skip("node or its package openai is not installed: npm --prefix ... install")
    done = subprocess.run(
        [node, str(FOLDER / "client.mjs"), base_url, MODEL],
        capture_output=True, text=True, timeout=270, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    assert len(results) == 10
    assert {name: text for name, text in results.items() if text != "ok"} == {}
