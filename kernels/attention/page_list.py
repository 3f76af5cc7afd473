"""The pages of a batch in one list, gathered on the device from the page table.

For kernels that want page ids in a row, sequence after sequence, instead of a table to look up.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from duograph.kernels.attention.base import AttentionMetadata

_BLOCK = 256  # sequences, and pages, of one step of a loop


# One variant whatever the batch is: none is compiled in a request.
@triton.jit(do_not_specialize=["bs", "table_stride"])
def page_list_kernel(
    page_table: tl.tensor,
    rows: tl.tensor,
    seq_lens: tl.tensor,
    indptr: tl.tensor,
    last_page_len: tl.tensor,
    ids: tl.tensor,
    bs: tl.tensor,
    table_stride: tl.tensor,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One program per sequence: it adds up the pages of all before it and copies its own."""
    me = tl.program_id(0)
    offsets = tl.arange(0, BLOCK)
    start = 0
    for first in range(0, me, BLOCK):
        others = first + offsets
        lens = tl.load(seq_lens + others, mask=others < me, other=0)
        start += tl.sum((lens + PAGE_SIZE - 1) // PAGE_SIZE)
    length = tl.load(seq_lens + me)
    count = (length + PAGE_SIZE - 1) // PAGE_SIZE
    source = page_table + tl.load(rows + me).to(tl.int64) * table_stride
    for first in range(0, count, BLOCK):
        mine = first + offsets
        page = tl.load(source + mine, mask=mine < count, other=0)
        tl.store(ids + start + mine, page, mask=mine < count)
    tl.store(indptr + me, start)
    tl.store(last_page_len + me, length - (count - 1) * PAGE_SIZE)
    if me == bs - 1:
        tl.store(indptr + bs, start + count)


def list_pages(
    meta: AttentionMetadata, indptr: torch.Tensor, last_page_len: torch.Tensor, ids: torch.Tensor
) -> None:
    """Fills the fronts of three int32 tensors on the device.

    Args:
        meta: a step of ``bs`` sequences.
        indptr: [> bs]; ``ids[indptr[i] : indptr[i + 1]]`` are the pages of sequence i.
        last_page_len: [>= bs]; tokens of the last page of each, 1 to ``meta.page_size``.
        ids: as long as all page lists together.
    """
    bs = meta.seq_lens.shape[0]
    page_list_kernel[(bs,)](
        meta.page_table,
        meta.req_pool_indices,
        meta.seq_lens,
        indptr,
        last_page_len,
        ids,
        bs,
        meta.page_table.stride(0),
        PAGE_SIZE=meta.page_size,
        BLOCK=_BLOCK,
    )
