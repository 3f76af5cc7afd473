"""Fixtures of the runner floor's tests."""

from __future__ import annotations

import sys

import pytest


@pytest.fixture(autouse=True)
def forget_traces() -> None:
    """Many tests trace the same forward, each for a worker of its own; torch.compile counts all
    of them against one limit."""
    if "torch._dynamo" in sys.modules:
        sys.modules["torch._dynamo"].reset()
