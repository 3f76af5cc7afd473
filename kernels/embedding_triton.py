"""Triton bodies of ``fused.embedding`` and ``fused.embed_rms_norm``: the start of a step.

A program copies one row of the table, and norms it while it is in registers, with the sums of
``fused_triton``'s norm, so with its bits. Knows no layer or model.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from duograph.kernels.pdl import pdl_launch


def embedding(input_ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """See ``fused.embedding``.

    Raises:
        ValueError: a tensor is not contiguous.
    """
    rows = _empty_rows(input_ids, table)
    _launch(input_ids, table, None, rows, rows, 0.0)
    return rows


def embed_rms_norm(
    input_ids: torch.Tensor, table: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``fused.embed_rms_norm``.

    Raises:
        ValueError: a tensor is not contiguous.
    """
    rows, normed = _empty_rows(input_ids, table), _empty_rows(input_ids, table)
    _launch(input_ids, table, weight, rows, normed, eps)
    return normed, rows


def _empty_rows(input_ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    if not (input_ids.is_contiguous() and table.is_contiguous()):
        raise ValueError("an embedding needs contiguous ids and a contiguous table")
    return torch.empty((input_ids.shape[0], table.shape[1]), dtype=table.dtype, device=table.device)


def _launch(
    input_ids: torch.Tensor,
    table: torch.Tensor,
    weight: torch.Tensor | None,
    rows: torch.Tensor,
    normed: torch.Tensor,
    eps: float,
) -> None:
    tokens, width = rows.shape
    if not tokens:
        return
    block = triton.next_power_of_2(width)
    _embed_kernel[(tokens,)](
        input_ids,
        table,
        table if weight is None else weight,
        rows,
        normed,
        eps,
        WIDTH=width,
        BLOCK=block,
        NORM=weight is not None,
        num_warps=max(1, min(16, block // 512)),
        **pdl_launch(table.device, tokens),
    )


@triton.jit(do_not_specialize_on_alignment=["input_ids"])
def _embed_kernel(
    input_ids: tl.tensor,
    table: tl.tensor,
    weight: tl.tensor,
    rows: tl.tensor,
    normed: tl.tensor,
    eps: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    NORM: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Grid (tokens,). Only ``weight`` is read before the wait: which row of the table it will be,
    the kernel before says. Tiles of one row, for the layout of ``fused_triton``'s norm."""
    if PDL:
        gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)[None, :]
    cells = columns < WIDTH
    if NORM:
        scale = tl.load(weight + columns, mask=cells, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
    source = table + tl.load(input_ids + token).to(tl.int64) * WIDTH
    row = tl.load(source + columns, mask=cells, other=0.0)
    tl.store(rows + token * WIDTH + columns, row, mask=cells)
    if NORM:
        values = row.to(tl.float32)
        mean = tl.sum(values * values, 1) / WIDTH
        result = values * tl.rsqrt(mean + eps)[:, None] * scale
        tl.store(normed + token * WIDTH + columns, result.to(normed.dtype.element_ty), mask=cells)
