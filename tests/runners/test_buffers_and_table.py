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
from duograph.runners.step_inputs import Layout, StepInputs

CPU = torch.device("cpu")


def decode_inputs(size: int, **more: Any) -> StepInputs:
    """Rows 1, 2 .. of lengths 11, 12 ..; ``more`` as in ``StepInputs.pack``."""
    return StepInputs.pack(
        np.arange(1, size + 1),
        np.arange(11, size + 11),
        np.arange(10, size + 10),
        np.arange(100, size + 100),
        **more,
    )


def extend_inputs(ids: Sequence[int]) -> StepInputs:
    """One sequence."""
    size = len(ids)
    return StepInputs.pack(
        np.array([1]),
        np.array([size]),
        np.arange(10, size + 10),
        np.arange(100, size + 100),
        input_ids=np.array(ids),
        extend_lens=[size],
    )


def apply(
    table: RequestTable, inits: Sequence[RowInit] = (), updates: Sequence[Sequence[int]] = ()
) -> None:
    """``updates``: row, column and page of each."""
    table.apply(inputs_of(inits, updates), inits)


def inputs_of(inits: Sequence[RowInit], updates: Sequence[Sequence[int]] = ()) -> StepInputs:
    return decode_inputs(
        1,
        page_updates=np.array(updates).T if updates else None,
        row_inits=[(init.row, init.sampling) for init in inits],
    )


@pytest.fixture
def buffers() -> GraphInputBuffers:
    return GraphInputBuffers(max_bs=8, max_tokens=16, device=CPU)


def test_fresh_buffers_hold_dummy_requests(buffers: GraphInputBuffers) -> None:
    assert buffers.req_pool_indices.tolist() == [0] * 8
    assert buffers.seq_lens.tolist() == [1] * 8
    for per_token in buffers.extend_inputs(16):
        assert per_token.tolist() == [0] * 16


def test_rows_behind_the_batch_are_dummies_whatever_was_there_before(
    buffers: GraphInputBuffers,
) -> None:
    for size in (8, 3, 5, 1, 8, 2):
        buffers.load_decode(decode_inputs(size), 8)
        padding = 8 - size
        assert buffers.req_pool_indices.tolist() == [*range(1, size + 1), *[0] * padding]
        assert buffers.seq_lens.tolist() == [*range(11, size + 11), *[1] * padding]
        assert torch.equal(buffers.seq_lens_cpu, buffers.seq_lens)
        assert buffers.decode_positions.tolist() == [*range(10, size + 10), *[0] * padding]
        assert buffers.decode_out_cache_loc.tolist() == [*range(100, size + 100), *[0] * padding]


def test_tokens_behind_the_prompt_are_dummies_whatever_was_there_before(
    buffers: GraphInputBuffers,
) -> None:
    for size, level in ((14, 16), (3, 16), (8, 8), (8, 11), (2, 3), (8, 16)):
        ids = list(range(50, 50 + size))
        buffers.load_extend(extend_inputs(ids), level)
        padding = [0] * (level - size)
        inputs = buffers.extend_inputs(level)
        assert inputs.input_ids.tolist() == [*ids, *padding]
        assert inputs.positions.tolist() == [*range(10, size + 10), *padding]
        assert inputs.out_cache_loc.tolist() == [*range(100, size + 100), *padding]


def test_addresses_never_change(buffers: GraphInputBuffers) -> None:
    def tensors() -> list[torch.Tensor]:
        by_level = [tensor for level in (1, 5, 16) for tensor in buffers.extend_inputs(level)]
        return [buffers.req_pool_indices, buffers.seq_lens, *by_level]

    before = [tensor.data_ptr() for tensor in tensors()]
    buffers.load_decode(decode_inputs(5), 8)
    buffers.load_extend(extend_inputs([0, 1, 2]), 5)
    buffers.reset()
    assert [tensor.data_ptr() for tensor in tensors()] == before
    assert not any(tensor.any() for tensor in buffers.extend_inputs(16))


def test_a_batch_that_does_not_fit_is_refused(buffers: GraphInputBuffers) -> None:
    with pytest.raises(ValueError, match="batch of 5 cannot be padded to 4"):
        buffers.load_decode(decode_inputs(5), 4)
    with pytest.raises(ValueError, match="padded to 9 in buffers of 8"):
        buffers.load_decode(decode_inputs(2), 9)
    with pytest.raises(ValueError, match="input_ids"):
        buffers.load_extend(decode_inputs(2), 4)


@pytest.fixture
def table() -> RequestTable:
    return RequestTable(max_running_requests=4, max_pages=3, vocab_size=10, device=CPU)


def test_a_fresh_table_holds_greedy_dummies_on_page_0(table: RequestTable) -> None:
    assert table.num_rows == 5
    assert not table.page_table.any() and not table.next_tokens.any()
    assert table.temperature.tolist() == [0.0] * 5
    assert table.nbytes > 5 * (3 * 4 + 8 + 10 * 5)


def test_rows_and_pages_are_applied(table: RequestTable) -> None:
    params = SamplingParams(
        temperature=0.5, top_p=0.9, top_k=7, min_p=0.2, seed=-(2**63),
        presence_penalty=0.1, frequency_penalty=0.2, repetition_penalty=1.3,
    )  # fmt: skip
    updates = [(3, 0, 7), (3, 2, 9), (1, 1, 4)]
    inits = [RowInit(3, params, [1, 5, 5], [8, 8, 2]), RowInit(1, SamplingParams(seed=5))]
    apply(table, inits, updates)
    assert table.page_table.tolist() == [[0] * 3, [0, 4, 0], [0] * 3, [7, 0, 9], [0] * 3]
    assert table.temperature[3] == 0.5 and table.top_p[3].item() == pytest.approx(0.9)
    assert table.top_k.tolist() == [-1, -1, -1, 7, -1]
    assert table.min_p[3].item() == pytest.approx(0.2)
    assert table.seed.tolist() == [0, 5, 0, -(2**63), 0]
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
        expected = torch.zeros(5, 3, dtype=torch.int32)
        for row, column in cells:
            expected[row, column] = 10 * row + column
        assert torch.equal(table.page_table, expected)
        untouched = 4 - rows
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


def test_pages_can_be_brought_before_what_the_sampler_reads(table: RequestTable) -> None:
    inits = [RowInit(2, SamplingParams(temperature=0.5, seed=9))]
    inputs = inputs_of(inits, [(2, 1, 6)])
    table.apply_pages(inputs)
    assert table.page_table[2].tolist() == [0, 6, 0]
    assert not table.temperature.any() and not table.seed.any()
    table.apply_rows(inputs, inits)
    assert table.temperature[2] == 0.5 and table.seed[2] == 9


def test_a_row_taken_again_forgets_its_last_request(table: RequestTable) -> None:
    penalized = SamplingParams(presence_penalty=1.0)
    apply(table, [RowInit(2, penalized, [1, 2], [3])])
    apply(table, [RowInit(2, penalized, [4], [])])
    assert table.prompt_mask[2].nonzero().flatten().tolist() == [4]
    assert not table.output_counts[2].any()


@pytest.mark.parametrize("sequences", [1, 2, 3])
@pytest.mark.parametrize("updates", [0, 1, 4])
@pytest.mark.parametrize("inits", [0, 1, 3])
def test_a_block_holds_every_section_and_its_copy_too(
    sequences: int, updates: int, inits: int
) -> None:
    lens = [2 + i for i in range(sequences)]
    total = sum(lens)
    params = [SamplingParams(temperature=0.25 * i, top_k=i, seed=-i) for i in range(inits)]
    packed = StepInputs.pack(
        np.arange(sequences) + 1,
        np.array(lens) + 100,
        np.arange(total),
        np.arange(total) + 2**40,
        input_ids=np.arange(total) + 7,
        extend_lens=lens,
        page_updates=np.arange(3 * updates).reshape(3, -1) if updates else None,
        row_inits=[(i + 1, one) for i, one in enumerate(params)],
    )
    layout = Layout(sequences, total, True, updates, inits)
    assert packed.layout == layout and len(packed.words) == sum(layout.sizes())
    for inputs in (packed, layout.views(packed.words.clone())):
        assert inputs.req_pool_indices.tolist() == [i + 1 for i in range(sequences)]
        assert inputs.seq_lens.tolist() == [n + 100 for n in lens]
        assert inputs.positions.tolist() == list(range(total))
        assert inputs.out_cache_loc.tolist() == [i + 2**40 for i in range(total)]
        assert inputs.input_ids is not None and inputs.last_rows is not None
        assert inputs.input_ids.tolist() == [i + 7 for i in range(total)]
        assert inputs.query_start_loc is not None
        ends = inputs.query_start_loc.tolist()[1:]
        assert inputs.query_start_loc[0] == 0 and ends == np.cumsum(lens).tolist()
        assert inputs.last_rows.tolist() == [end - 1 for end in ends]
        if updates:
            assert inputs.page_updates is not None
            assert inputs.page_updates.flatten().tolist() == list(range(3 * updates))
        if inits:
            assert inputs.row_ints is not None and inputs.row_floats is not None
            wanted = [[i + 1, i, -i] for i in range(inits)]
            assert inputs.row_ints.T.tolist() == wanted
            assert inputs.row_floats[0].tolist() == [0.25 * i for i in range(inits)]
            assert inputs.row_floats[5].tolist() == [1.0] * inits
        assert (inputs.page_updates is None, inputs.row_ints is None) == (not updates, not inits)
