"""A step's inputs reach buffers and tables, from page-locked memory and from the device."""

from __future__ import annotations

import pytest
import torch

from duograph.kernels import step_inputs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
LONGS, INTS = torch.int64, torch.int32


def numbers(count: int, dtype: torch.dtype, offset: int) -> torch.Tensor:
    """Page-locked, and not aligned unless ``offset`` is even."""
    block = torch.empty(count + offset, dtype=dtype, pin_memory=True)
    block.copy_(torch.randint(-(2**31), 2**31, (count + offset,)))
    return block[offset:]


def filled(count: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full((count,), -7, dtype=dtype, device="cuda")


@pytest.mark.parametrize("count, end", [(1, 1), (3, 8), (8, 8), (511, 512), (5000, 8192)])
@pytest.mark.parametrize("dtypes", [(LONGS,), (LONGS,) * 3, (LONGS, LONGS, LONGS, INTS)])
@pytest.mark.parametrize("on_device", [False, True])
def test_vectors_are_copied_and_padded(
    count: int, end: int, dtypes: tuple[torch.dtype, ...], on_device: bool
) -> None:
    sources = [numbers(count, dtype, offset) for offset, dtype in enumerate(dtypes)]
    targets = [filled(end + 1, dtype) for dtype in dtypes]
    fills = [0, 3, 2, 1][: len(dtypes)]
    read = [source.cuda() if on_device else source for source in sources]
    step_inputs.copy_padded(read, targets, fills, count=count, end=end)
    torch.cuda.synchronize()
    for source, target, fill in zip(sources, targets, fills, strict=True):
        assert target.tolist() == [*source.tolist(), *[fill] * (end - count), -7]


@pytest.mark.parametrize("count", [1, 2, 1500])
def test_pages_and_rows_land_where_the_twin_on_the_cpu_puts_them(count: int) -> None:
    cells = torch.randperm(count * 3)[:count]
    updates = torch.stack([cells // 3, cells % 3, torch.arange(count) + 9]).to(INTS)
    ints = torch.stack([torch.randperm(count + 2)[:count], *torch.randint(-9, 9, (2, count))])
    floats = torch.rand(6, count)
    tables = [
        torch.zeros(count, 3, dtype=INTS),
        torch.zeros(2, count + 2, dtype=LONGS),
        torch.zeros(6, count + 2),
    ]
    on_device = [table.cuda() for table in tables]
    step_inputs.update_pages(updates, tables[0])
    step_inputs.update_rows(ints, floats, *tables[1:])
    step_inputs.update_pages(updates.pin_memory(), on_device[0])
    step_inputs.update_rows(ints.pin_memory(), floats.pin_memory(), *on_device[1:])
    torch.cuda.synchronize()
    for table, wanted in zip(on_device, tables, strict=True):
        assert torch.equal(table.cpu(), wanted)


def test_an_event_says_when_a_vector_is_on_the_host() -> None:
    for round_ in range(200):
        source = torch.arange(256, device="cuda") + round_
        target = torch.full((256,), -1, dtype=LONGS, pin_memory=True)
        step_inputs.to_host(source, target)
        done = torch.cuda.Event()
        done.record()
        done.synchronize()
        assert target.tolist() == list(range(round_, round_ + 256))
