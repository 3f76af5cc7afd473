"""The batch builder's page-locked path."""

from __future__ import annotations

import pytest
import torch

from duograph.scheduler.batch_builder import BatchBuilder
from duograph.tests.scheduler.driver import LIMITS, Driver, request

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_pinned_blocks_are_page_locked_and_hold_the_same_numbers() -> None:
    driver = Driver()
    driver.step(request(1, prompt=10), request(2, prompt=9))
    driver.step()
    driver.step()
    pinned = BatchBuilder(page_size=LIMITS.page_size, pinned=True)
    plain = BatchBuilder(page_size=LIMITS.page_size, pinned=False)
    for plan in driver.plans:
        fast, slow = pinned.build(plan).inputs, plain.build(plan).inputs
        assert fast.layout == slow.layout and torch.equal(fast.words, slow.words)
        assert fast.words.is_pinned() and fast.readable_by(torch.device("cuda")) is fast.words
        copied = slow.readable_by(torch.device("cuda"))
        assert copied.is_cuda and torch.equal(copied.cpu(), slow.words)
