"""compute-sanitizer over five prefill and twenty decode steps: no access out of bounds."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

TOOL = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
SCRIPT = Path(__file__).with_name("sanitized_steps.py")
FOUND = 86  # exit code of the tool when it found something

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(not Path(TOOL).is_file(), reason="compute-sanitizer is not installed"),
]


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("graphs", "page_size"),
    [(False, 64), (False, 16), (True, 64)],
    ids=["eager, pages of 64", "eager, pages of 16", "graphs"],
)
def test_memcheck_finds_nothing(graphs: bool, page_size: int) -> None:
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(sys.path),
        "PYTORCH_NO_CUDA_MEMORY_CACHING": "0" if graphs else "1",
    }
    if graphs:
        del environment["PYTORCH_NO_CUDA_MEMORY_CACHING"]
    command = [TOOL, "--tool", "memcheck", "--leak-check", "no", "--error-exitcode", str(FOUND)]
    command += [sys.executable, str(SCRIPT), "--page-size", str(page_size)]
    done = subprocess.run(
        command + ["--graphs"] * graphs,
        capture_output=True,
        text=True,
        timeout=230,
        check=False,
        env=environment,
    )
    output = done.stdout[-6000:] + done.stderr[-3000:]
    if "Device not supported" in output:
        pytest.skip("compute-sanitizer does not run on this machine")
    assert done.returncode == 0, output
    assert "DONE 5 prefill, 20 decode steps" in done.stdout, output
    assert "ERROR SUMMARY: 0 errors" in output, output
