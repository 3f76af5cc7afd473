"""The static buffers and the request tables: what a batch leaves in them."""

from __future__ import annotations

import pytest
import torch

from duograph.runners.batch import ForwardBatch, ForwardMode, RowInit, SamplingBatch
from duograph.runners.buffers import GraphInputBuffers
from duograph.runners.request_table import RequestTable
from duograph.runners.sampling_params import SamplingParams

CPU = torch.device("cpu")


def decode_batch(size: int, **changes: object) -> ForwardBatch:
    fields: dict[str, object] = {
        "step_id": 1,
        "mode": ForwardMode.DECODE,
        "req_pool_indices": torch.arange(1, size + 1),
        "seq_lens": torch.arange(11, size + 11, dtype=torch.int32),
        "positions": torch.arange(10, size + 10),
        "out_cache_loc": torch.arange(100, size + 100),
        "input_ids": None,
        "extend_lens": [1] * size,
        "page_updates": None,
        "row_inits": [],
        "sampling": SamplingBatch(),
    }
    return ForwardBatch(**(fields | changes))  # type: ignore[arg-type]


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
        buffers.load_decode(decode_batch(size), 8)
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
        ids = torch.arange(50, 50 + size)
        batch = decode_batch(size, mode=ForwardMode.EXTEND, input_ids=ids)
        buffers.load_extend(batch, level)
        padding = [0] * (level - size)
        inputs = buffers.extend_inputs(level)
        assert inputs.input_ids.tolist() == [*ids.tolist(), *padding]
        assert inputs.positions.tolist() == [*range(10, size + 10), *padding]
        assert inputs.out_cache_loc.tolist() == [*range(100, size + 100), *padding]


def test_addresses_never_change(buffers: GraphInputBuffers) -> None:
    def tensors() -> list[torch.Tensor]:
        by_level = [tensor for level in (1, 5, 16) for tensor in buffers.extend_inputs(level)]
        return [buffers.req_pool_indices, buffers.seq_lens, *by_level]

    before = [tensor.data_ptr() for tensor in tensors()]
    buffers.load_decode(decode_batch(5), 8)
    batch = decode_batch(3, mode=ForwardMode.EXTEND, input_ids=torch.arange(3))
    buffers.load_extend(batch, 5)
    buffers.reset()
    assert [tensor.data_ptr() for tensor in tensors()] == before
    assert not any(tensor.any() for tensor in buffers.extend_inputs(16))


def test_a_batch_that_does_not_fit_is_refused(buffers: GraphInputBuffers) -> None:
    with pytest.raises(ValueError, match="batch of 5 cannot be padded to 4"):
        buffers.load_decode(decode_batch(5), 4)
    with pytest.raises(ValueError, match="padded to 9 in buffers of 8"):
        buffers.load_decode(decode_batch(2), 9)
    with pytest.raises(ValueError, match="input_ids"):
        buffers.load_extend(decode_batch(2, mode=ForwardMode.EXTEND), 4)


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
    updates = torch.tensor([[3, 3, 1], [0, 2, 1], [7, 9, 4]], dtype=torch.int32)
    inits = [RowInit(3, params, [1, 5, 5], [8, 8, 2]), RowInit(1, SamplingParams(seed=5))]
    table.apply(decode_batch(1, row_inits=inits, page_updates=updates))
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
    updates = (
        torch.tensor([[r, c, 10 * r + c] for r, c in cells], dtype=torch.int32)
        .reshape(-1, 3)
        .T.contiguous()
    )
    batch = decode_batch(1, row_inits=inits, page_updates=updates if pages else None)
    for _ in range(2):
        table.apply(batch)
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
    updates = torch.tensor([[2], [1], [6]], dtype=torch.int32)
    inits = [RowInit(2, SamplingParams(temperature=0.5, seed=9))]
    batch = decode_batch(1, row_inits=inits, page_updates=updates)
    table.apply_pages(batch)
    assert table.page_table[2].tolist() == [0, 6, 0]
    assert not table.temperature.any() and not table.seed.any()
    table.apply_rows(batch)
    assert table.temperature[2] == 0.5 and table.seed[2] == 9


def test_a_row_taken_again_forgets_its_last_request(table: RequestTable) -> None:
    penalized = SamplingParams(presence_penalty=1.0)
    table.apply(decode_batch(1, row_inits=[RowInit(2, penalized, [1, 2], [3])]))
    table.apply(decode_batch(1, row_inits=[RowInit(2, penalized, [4], [])]))
    assert table.prompt_mask[2].nonzero().flatten().tolist() == [4]
    assert not table.output_counts[2].any()
