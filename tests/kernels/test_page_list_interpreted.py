"""The page list kernel without a GPU, through Triton's interpreter; see
test_triton_interpreted.py."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("set TRITON_INTERPRET=1", allow_module_level=True)

from duograph.kernels.attention.base import AttentionMetadata
from duograph.kernels.attention.page_list import list_pages


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("bs", [1, 5, 300])
def test_pages_of_every_sequence_come_one_after_the_other(bs: int, page_size: int) -> None:
    generator = torch.Generator().manual_seed(bs)
    lens = torch.randint(1, 300, (bs,), generator=generator, dtype=torch.int32)
    table = torch.randint(0, 1000, (bs + 4, 300), generator=generator, dtype=torch.int32)
    rows = torch.randperm(bs + 4, generator=generator)[:bs]
    meta = AttentionMetadata(
        page_table=table,
        req_pool_indices=rows,
        seq_lens=lens,
        out_cache_loc=torch.zeros(bs, dtype=torch.int64),
        page_size=page_size,
    )
    expected = [
        table[row, : -(-length // page_size)]
        for row, length in zip(rows.tolist(), lens.tolist(), strict=True)
    ]
    starts = [0, *torch.tensor([len(pages) for pages in expected]).cumsum(0).tolist()]
    indptr = torch.full((bs + 2,), -1, dtype=torch.int32)
    last = torch.full((bs + 1,), -1, dtype=torch.int32)
    ids = torch.full((starts[-1] + 3,), -1, dtype=torch.int32)
    list_pages(meta, indptr, last, ids)
    assert indptr.tolist() == [*starts, -1]
    assert last.tolist() == [*((lens - 1) % page_size + 1).tolist(), -1]
    assert ids.tolist() == [*torch.cat(expected).tolist(), -1, -1, -1]
