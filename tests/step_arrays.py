"""A step's block of numbers, taken apart again: what the device makes of it, as numpy arrays."""

from __future__ import annotations

from dataclasses import dataclass

from duograph.kernels.step_inputs import Ints, token_places
from duograph.runners.step_inputs import StepInputs


@dataclass(slots=True)
class StepArrays:
    rows: Ints  # [bs]
    seq_lens: Ints  # [bs], including this step
    positions: Ints  # [num_tokens]
    out_cache_loc: Ints  # [num_tokens]
    input_ids: Ints | None  # [num_tokens]; None in decode
    page_updates: Ints  # [3, n]: row, column, page


def step_arrays(inputs: StepInputs, page_size: int) -> StepArrays:
    block, layout = inputs.words.numpy(), inputs.layout
    size, pages_end = layout.sequences, 2 * layout.sequences + layout.pages
    rows, seq_lens, pages = block[:size], block[size : 2 * size], block[2 * size : pages_end]
    updates = block[layout.updates_at : layout.inits_at].reshape(-1, 3).T
    starts = block[pages_end : pages_end + size] if inputs.is_extend else seq_lens - 1
    positions, slots = token_places(seq_lens, starts, pages, page_size)
    ids = block[layout.tokens_at : layout.words] if inputs.is_extend else None
    return StepArrays(rows, seq_lens, positions, slots, ids, updates)
