"""A step's block of numbers reaches buffers and tables on CUDA as its twin on the CPU brings it
there, from page-locked memory and from the device."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from duograph.kernels.step_inputs import Tables
from duograph.runners.buffers import GraphInputBuffers
from duograph.runners.request_table import RequestTable
from duograph.runners.sampling_params import SamplingParams
from duograph.runners.step_inputs import StepInputs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
PAGE, ROWS, COLUMNS, TOKENS = 16, 600, 300, 8192
DEVICES = ("cpu", "cuda")


class Side:
    """Buffers and tables on one device, with leftovers everywhere."""

    def __init__(self, name: str) -> None:
        device = torch.device(name)
        self.buffers = GraphInputBuffers(
            max_bs=ROWS, max_tokens=TOKENS, page_size=PAGE, device=device
        )
        self.table = RequestTable(
            max_running_requests=ROWS, max_pages=COLUMNS, vocab_size=8, device=device
        )
        self.table.next_tokens.copy_(torch.arange(ROWS + 1) * 3)
        for tensor in self.tensors():
            if tensor is not self.table.next_tokens:
                tensor.fill_(77)

    def tensors(self) -> list[torch.Tensor]:
        buffers, tables = self.buffers, self.table.tables
        by_row = [buffers.req_pool_indices, buffers.seq_lens, buffers.last_rows]
        decode = [buffers.decode_ids, buffers.decode_positions, buffers.decode_out_cache_loc]
        tokens = [*buffers.extend_inputs(TOKENS), buffers.query_start_loc]
        return [*by_row, *decode, *tokens, *tables]

    @property
    def tables(self) -> Tables:
        return self.table.tables


def common(generator: np.random.Generator, updates: int, inits: int) -> dict[str, Any]:
    cells = generator.permutation(ROWS * COLUMNS)[:updates]
    params = [
        SamplingParams(temperature=0.1 * i, top_k=i, top_p=0.5, seed=-(2**62) + i, min_p=0.3)
        for i in range(inits)
    ]
    rows = generator.permutation(ROWS)[:inits] + 1
    return {
        "page_updates": [(int(c) // COLUMNS, int(c) % COLUMNS, i + 1) for i, c in enumerate(cells)],
        "row_inits": list(zip(rows.tolist(), params, strict=True)),
    }


def assert_equal(sides: list[Side]) -> None:
    torch.cuda.synchronize()
    for wanted, found in zip(*(side.tensors() for side in sides), strict=True):
        assert torch.equal(wanted, found.cpu())
    assert torch.equal(*(side.buffers.seq_lens_cpu for side in sides))


@pytest.mark.parametrize("size, padded", [(1, 1), (3, 8), (8, 8), (511, 512), (512, 600)])
@pytest.mark.parametrize("updates, inits", [(0, 0), (1, 1), (1500, 40)])
@pytest.mark.parametrize("pinned", [True, False])
def test_decode(size: int, padded: int, updates: int, inits: int, pinned: bool) -> None:
    generator = np.random.default_rng(size)
    rows = (generator.permutation(ROWS)[:size] + 1).tolist()
    lens = generator.integers(1, 5000, size).tolist()
    pages = generator.permutation(9999)[:size].tolist()
    more = common(generator, updates, inits)
    sides = [Side(name) for name in DEVICES]
    for side in sides:
        inputs = StepInputs.decode(rows, lens, pages, pinned=pinned, **more)
        side.buffers.load_decode(inputs, padded, side.tables)
        torch.cuda.synchronize()
    assert_equal(sides)


@pytest.mark.parametrize(
    "lens, padded",
    [
        ([1], 1),
        ([5], 16),
        ([1024], 1024),
        ([8192], 8192),
        ([3, 1, 700, 2], 1024),
        ([9] * 512, 4608),
    ],
)
@pytest.mark.parametrize("prefix", [0, 37])
@pytest.mark.parametrize("updates, inits", [(0, 0), (1, 1), (600, 512)])
def test_extend(lens: list[int], padded: int, prefix: int, updates: int, inits: int) -> None:
    generator = np.random.default_rng(sum(lens))
    starts = [prefix + i % 3 if prefix else 0 for i in range(len(lens))]
    ends = [start + count for start, count in zip(starts, lens, strict=True)]
    columns = [(e - 1) // PAGE - s // PAGE + 1 for s, e in zip(starts, ends, strict=True)]
    ids = generator.integers(0, 2**31 - 1, sum(lens), dtype=np.int32)
    edges = np.cumsum([0, *lens])
    more = common(generator, updates, inits)
    sides = [Side(name) for name in DEVICES]
    for side in sides:
        inputs = StepInputs.extend(
            list(range(1, len(lens) + 1)),
            ends,
            (np.arange(sum(columns)) + 5).tolist(),
            starts=starts,
            tokens=[ids[a:b] for a, b in pairwise(edges)],
            page_size=PAGE,
            pinned=True,
            **more,
        )
        side.buffers.load_extend(inputs, padded, side.tables, max(lens))
        torch.cuda.synchronize()
    assert_equal(sides)


def test_an_event_says_when_a_vector_is_on_the_host() -> None:
    from duograph.kernels.step_inputs_triton import to_host

    for turn in range(200):
        source = torch.arange(256, device="cuda") + turn
        target = torch.full((256,), -1, dtype=torch.int64, pin_memory=True)
        to_host(source, target)
        done = torch.cuda.Event()
        done.record()
        done.synchronize()
        assert target.tolist() == list(range(turn, turn + 256))
