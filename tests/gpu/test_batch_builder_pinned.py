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
FIELDS = (
    "req_pool_indices",
    "seq_lens",
    "positions",
    "out_cache_loc",
    "input_ids",
    "last_rows",
    "query_start_loc",
    "page_updates",
    "row_ints",
    "row_floats",
)


def test_pinned_tensors_are_page_locked_and_hold_the_same_numbers() -> None:
    driver = Driver()
    driver.step(request(1, prompt=10), request(2, prompt=9))
    driver.step()
    driver.step()
    pinned = BatchBuilder(page_size=LIMITS.page_size, pinned=True)
    plain = BatchBuilder(page_size=LIMITS.page_size, pinned=False)
    for plan in driver.plans:
        fast, slow = pinned.build(plan).inputs, plain.build(plan).inputs
        for name in FIELDS:
            tensor, wanted = getattr(fast, name), getattr(slow, name)
            assert (tensor is None) == (wanted is None), name
            if tensor is None:
                continue
            assert tensor.is_pinned() and tensor.is_contiguous(), name
            assert tensor.dtype == wanted.dtype and torch.equal(tensor, wanted), name
            moved = getattr(fast.to(torch.device("cuda")), name)
            assert moved.is_cuda and torch.equal(moved.cpu(), wanted), name
