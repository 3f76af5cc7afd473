"""When kernels may start early."""

from __future__ import annotations

import pytest
import torch

from duograph.kernels import pdl

CUDA = torch.device("cuda", 0)


def test_kernels_of_decode_steps_start_early_and_those_of_long_steps_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pdl, "_has_pdl", lambda index: True)
    early, late = {"PDL": True, "launch_pdl": True}, {"PDL": False}
    assert pdl.pdl_launch(CUDA) == pdl.pdl_launch(CUDA, 512) == early
    assert pdl.pdl_launch(CUDA, 513) == pdl.pdl_launch(CUDA, 8192) == late
    assert pdl.pdl_launch(torch.device("cpu")) == late
    monkeypatch.setattr(pdl, "_has_pdl", lambda index: False)
    assert pdl.pdl_launch(CUDA) == late
