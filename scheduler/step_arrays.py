"""A plan as flat arrays: where each token stands and which KV slot it is written to.

Numpy only, so that the simulator checks the very arrays the device gets.
slot = page * page_size + position % page_size.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from duograph.scheduler.step import Plan

Ints = npt.NDArray[np.int64]


@dataclass(slots=True)
class StepArrays:
    """The tensors of a ForwardBatch, as numpy arrays on the host."""

    rows: Ints  # [bs]
    seq_lens: Ints  # [bs], including this step
    positions: Ints  # [num_tokens]
    out_cache_loc: Ints  # [num_tokens]
    input_ids: Ints | None  # [num_tokens]; None in decode
    page_updates: Ints | None  # [3, n]: row, column, page


def step_arrays(plan: Plan, page_size: int) -> StepArrays:
    rows = np.array(plan.rows, np.int64)
    seq_lens = np.array(plan.seq_lens, np.int64)
    pages = np.array(plan.pages, np.int64)
    updates = np.array(plan.page_updates, np.int64).T if plan.page_updates else None
    if not plan.is_extend:
        positions = seq_lens - 1
        slots = pages * page_size + positions % page_size
        return StepArrays(rows, seq_lens, positions, slots, None, updates)
    starts = np.array(plan.starts, np.int64)
    lens = seq_lens - starts
    # Position of token i of the step: its index, moved by what its sequence's own start is off.
    positions = np.arange(lens.sum()) + np.repeat(starts - (np.cumsum(lens) - lens), lens)
    # Likewise for its page: ``pages`` has, per sequence, columns first .. last of the chunk.
    first = starts // page_size
    columns = (seq_lens - 1) // page_size - first + 1
    at = positions // page_size + np.repeat((np.cumsum(columns) - columns) - first, lens)
    slots = pages[at] * page_size + positions % page_size
    input_ids = np.concatenate(plan.tokens, dtype=np.int64)
    return StepArrays(rows, seq_lens, positions, slots, input_ids, updates)
