"""A step's inputs from where they were brought to where kernels find them: static buffers of
graphs and the tables by request row.

Triton on CUDA, which reads its sources over the bus too if they lie in page-locked host memory;
aten elsewhere. Plain tensors only: what they mean is the caller's business.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def copy_padded(
    sources: Sequence[torch.Tensor],
    targets: Sequence[torch.Tensor],
    fills: Sequence[int],
    *,
    count: int,
    end: int,
) -> None:
    """Copies the first ``count`` elements of up to four vectors to the front of as many others,
    and writes the fill value of each from there to ``end``. Integers of one width a pair."""
    if targets[0].is_cuda:
        from duograph.kernels import step_inputs_triton

        step_inputs_triton.copy_padded(sources, targets, fills, count=count, end=end)
        return
    for source, target, fill in zip(sources, targets, fills, strict=True):
        target[:count] = source[:count]
        if end > count:
            target[count:end].fill_(fill)


def update_pages(updates: torch.Tensor, page_table: torch.Tensor) -> None:
    """``page_table[row, column] = page`` for each column of ``updates``, int32 [3, n]."""
    if page_table.is_cuda:
        from duograph.kernels import step_inputs_triton

        step_inputs_triton.update_pages(updates, page_table)
        return
    row, column, page = updates
    page_table.index_put_((row.long(), column.long()), page)


def update_rows(
    ints: torch.Tensor, floats: torch.Tensor, int_table: torch.Tensor, float_table: torch.Tensor
) -> None:
    """Writes columns of two tables, [2, R] and [6, R]. ``ints`` [3, m]: the columns' indices,
    then their values; ``floats`` [6, m]."""
    if int_table.is_cuda:
        from duograph.kernels import step_inputs_triton

        step_inputs_triton.update_rows(ints, floats, int_table, float_table)
        return
    int_table.index_copy_(1, ints[0], ints[1:])
    float_table.index_copy_(1, ints[0], floats)


def to_host(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copies a vector on CUDA to page-locked memory of the host, by a kernel: one that follows
    starts some microseconds earlier than behind a copy engine. Complete once an event recorded
    behind it is."""
    from duograph.kernels import step_inputs_triton

    step_inputs_triton.copy_padded([source], [target], [0], count=len(source), end=len(source))
