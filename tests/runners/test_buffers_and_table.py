"""The static buffers and the request tables: what a batch leaves in them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from duograph.runners.batch import RowInit
from duograph.runners.buffers import GraphInputBuffers
from duograph.runners.request_table import RequestTable
from duograph.runners.sampling_params import SamplingParams
from duograph.runners.step_inputs import StepInputs

CPU = torch.device("cpu")


PAGE = 4


def decode_inputs(size: int, **more: Any) -> StepInputs:
    """Rows 1, 2 .. of lengths 11, 12 .. on pages 7, 8 ..; ``more`` as in ``StepInputs.decode``."""
    rows, lens = range(1, size + 1), range(11, size + 11)
    return StepInputs.decode(rows, lens, range(7, size + 7), **more)


def extend_inputs(ids: Sequence[int], start: int = 10) -> StepInputs:
    """One sequence in row 1, behind ``start`` tokens, on pages 20, 21 .."""
    end = start + len(ids)
    pages = range(20, 20 + (end - 1) // PAGE - start // PAGE + 1)
    return StepInputs.extend(
        [1], [end], pages, starts=[start], tokens=[np.array(ids)], page_size=PAGE
    )


def apply(
    table: RequestTable,
    inits: Sequence[RowInit] = (),
    updates: Sequence[tuple[int, int, int]] = (),
) -> None:
    """``updates``: row, column and page of each."""
    buffers = GraphInputBuffers(max_bs=8, max_tokens=16, page_size=PAGE, device=CPU)
    row_inits = [(init.row, init.sampling) for init in inits]
    inputs = decode_inputs(1, page_updates=updates, row_inits=row_inits)
    buffers.load_decode(inputs, 1, table.tables)
    table.init_counts(inits)


@pytest.fixture
def buffers() -> GraphInputBuffers:
    return GraphInputBuffers(max_bs=8, max_tokens=16, page_size=PAGE, device=CPU)


def test_fresh_buffers_hold_dummy_requests(buffers: GraphInputBuffers) -> None:
    assert buffers.req_pool_indices.tolist() == [0] * 8
    assert buffers.seq_lens.tolist() == [1] * 8
    for per_token in buffers.extend_inputs(16):
        assert per_token.tolist() == [0] * 16


def test_rows_behind_the_batch_are_dummies_whatever_was_there_before(
    buffers: GraphInputBuffers, table: RequestTable
) -> None:
    table.next_tokens[1:] = torch.arange(61, 69)
    for size in (8, 3, 5, 1, 8, 2):
        buffers.load_decode(decode_inputs(size), 8, table.tables)
        padding = 8 - size
        lens = [*range(11, size + 11)]
        assert buffers.req_pool_indices.tolist() == [*range(1, size + 1), *[0] * padding]
        assert buffers.seq_lens.tolist() == [*lens, *[1] * padding]
        assert torch.equal(buffers.seq_lens_cpu, buffers.seq_lens)
        assert buffers.decode_ids.tolist() == [*range(61, size + 61), *[0] * padding]
        assert buffers.decode_positions.tolist() == [*(n - 1 for n in lens), *[0] * padding]
        slots = [(7 + i) * PAGE + (n - 1) % PAGE for i, n in enumerate(lens)]
        assert buffers.decode_out_cache_loc.tolist() == [*slots, *[0] * padding]


def test_tokens_behind_the_prompt_are_dummies_whatever_was_there_before(
    buffers: GraphInputBuffers, table: RequestTable
) -> None:
    for size, level in ((14, 16), (3, 16), (8, 8), (8, 11), (2, 3), (8, 16)):
        ids = list(range(50, 50 + size))
        buffers.load_extend(extend_inputs(ids), level, table.tables, size)
        padding = [0] * (level - size)
        inputs = buffers.extend_inputs(level)
        where = range(10, 10 + size)
        slots = [(20 + p // PAGE - 10 // PAGE) * PAGE + p % PAGE for p in where]
        assert inputs.input_ids.tolist() == [*ids, *padding]
        assert inputs.positions.tolist() == [*where, *padding]
        assert inputs.out_cache_loc.tolist() == [*slots, *padding]


def test_an_extend_step_has_its_sequences_one_after_the_other(
    buffers: GraphInputBuffers, table: RequestTable
) -> None:
    inputs = StepInputs.extend(
        [3, 1, 2],
        [5, 9, 6],
        [30, 31, 40, 41, 50, 51],
        starts=[0, 7, 1],
        tokens=[np.arange(5), np.arange(2) + 10, np.arange(5, dtype=np.int32) + 20],
        page_size=PAGE,
    )
    buffers.load_extend(inputs, 12, table.tables, 5)
    assert buffers.req_pool_indices[:3].tolist() == [3, 1, 2]
    assert buffers.seq_lens[:3].tolist() == buffers.seq_lens_cpu.tolist() == [5, 9, 6]
    assert buffers.query_start_loc[:4].tolist() == [0, 5, 7, 12]
    assert buffers.last_rows[:3].tolist() == [4, 6, 11]
    ids, positions, slots = (tensor.tolist() for tensor in buffers.extend_inputs(12))
    assert ids == [0, 1, 2, 3, 4, 10, 11, 20, 21, 22, 23, 24]
    assert positions == [0, 1, 2, 3, 4, 7, 8, 1, 2, 3, 4, 5]
    pages = [30, 30, 30, 30, 31, 40, 41, 50, 50, 50, 51, 51]
    assert slots == [page * PAGE + at % PAGE for page, at in zip(pages, positions, strict=True)]


def test_addresses_never_change(buffers: GraphInputBuffers, table: RequestTable) -> None:
    def tensors() -> list[torch.Tensor]:
        by_level = [tensor for level in (1, 5, 16) for tensor in buffers.extend_inputs(level)]
        return [buffers.req_pool_indices, buffers.seq_lens, *by_level]

    before = [tensor.data_ptr() for tensor in tensors()]
    buffers.load_decode(decode_inputs(4), 8, table.tables)
    buffers.load_extend(extend_inputs([0, 1, 2]), 5, table.tables, 3)
    buffers.reset()
    assert [tensor.data_ptr() for tensor in tensors()] == before
    assert not any(tensor.any() for tensor in buffers.extend_inputs(16))


def test_a_batch_that_does_not_fit_is_refused(
    buffers: GraphInputBuffers, table: RequestTable
) -> None:
    with pytest.raises(ValueError, match="batch of 5 cannot be padded to 4"):
        buffers.load_decode(decode_inputs(5), 4, table.tables)
    with pytest.raises(ValueError, match="padded to 9 in buffers of 8"):
        buffers.load_decode(decode_inputs(2), 9, table.tables)
    with pytest.raises(ValueError, match="needs tokens"):
        buffers.load_extend(decode_inputs(2), 4, table.tables, 1)


@pytest.fixture
def table() -> RequestTable:
    return RequestTable(max_running_requests=8, max_pages=3, vocab_size=10, device=CPU)


def test_a_fresh_table_holds_greedy_dummies_on_page_0(table: RequestTable) -> None:
    assert table.num_rows == 9
    assert not table.page_table.any() and not table.next_tokens.any()
    assert table.temperature.tolist() == [0.0] * 9
    assert table.nbytes > 9 * (3 * 4 + 8 + 10 * 5)


def test_rows_and_pages_are_applied(table: RequestTable) -> None:
    params = SamplingParams(
        temperature=0.5, top_p=0.9, top_k=7, min_p=0.2, seed=-(2**63),
        presence_penalty=0.1, frequency_penalty=0.2, repetition_penalty=1.3,
    )  # fmt: skip
    updates = [(3, 0, 7), (3, 2, 9), (1, 1, 4)]
    inits = [RowInit(3, params, [1, 5, 5], [8, 8, 2]), RowInit(1, SamplingParams(seed=5))]
    apply(table, inits, updates)
    assert table.page_table.tolist()[:5] == [[0] * 3, [0, 4, 0], [0] * 3, [7, 0, 9], [0] * 3]
    assert table.temperature[3] == 0.5 and table.top_p[3].item() == pytest.approx(0.9)
    assert table.top_k.tolist() == [-1, -1, -1, 7, *[-1] * 5]
    assert table.min_p[3].item() == pytest.approx(0.2)
    assert table.seed.tolist() == [0, 5, 0, -(2**63), *[0] * 5]
    penalties = (table.presence, table.frequency, table.repetition)
    assert [p[3].item() for p in penalties] == pytest.approx([0.1, 0.2, 1.3])
    assert [p[1].item() for p in penalties] == [0.0, 0.0, 1.0]
    assert table.prompt_mask[3].nonzero().flatten().tolist() == [1, 5]
    assert table.output_counts[3].tolist() == [0, 0, 1, 0, 0, 0, 0, 0, 2, 0]


@pytest.mark.parametrize("rows", [0, 1, 2, 3])
@pytest.mark.parametrize("pages", [0, 1, 2, 5])
def test_any_number_of_rows_and_pages_is_applied_and_again_changes_nothing(
    table: RequestTable, rows: int, pages: int
) -> None:
    """One block holds both, of two widths; rows and pages are those of the tests above."""
    inits = [
        RowInit(row, SamplingParams(temperature=row / 4, top_k=row, seed=2**62 + row))
        for row in range(1, rows + 1)
    ]
    cells = [(1, 0), (4, 2), (2, 1), (0, 2), (3, 0)][:pages]
    updates = [(row, column, 10 * row + column) for row, column in cells]
    for _ in range(2):
        apply(table, inits, updates)
        expected = torch.zeros(9, 3, dtype=torch.int32)
        for row, column in cells:
            expected[row, column] = 10 * row + column
        assert torch.equal(table.page_table, expected)
        untouched = 8 - rows
        assert table.seed.tolist() == [
            0,
            *(2**62 + r for r in range(1, rows + 1)),
            *[0] * untouched,
        ]
        assert table.top_k.tolist() == [-1, *range(1, rows + 1), *[-1] * untouched]
        assert table.temperature.tolist() == [
            0,
            *(r / 4 for r in range(1, rows + 1)),
            *[0] * untouched,
        ]


def test_a_row_taken_again_forgets_its_last_request(table: RequestTable) -> None:
    penalized = SamplingParams(presence_penalty=1.0)
    apply(table, [RowInit(2, penalized, [1, 2], [3])])
    apply(table, [RowInit(2, penalized, [4], [])])
    assert table.prompt_mask[2].nonzero().flatten().tolist() == [4]
    assert not table.output_counts[2].any()
