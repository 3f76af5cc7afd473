"""Log-probabilities of a prompt's own tokens, from the hidden states of an eager extend step.

The head is applied to a few rows at a time: length x vocabulary never exists at once. This file
knows no request; which rows are wanted stands in the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from duograph.kernels import sampling
from duograph.runners.batch import PromptWish, TokenLogprobs
from duograph.runners.upload import upload

# Of float32 logits at once. Their log-softmax and the head's own output are held beside them,
# which together stays below what memory planning keeps in reserve.
MAX_LOGITS_BYTES = 64 * 1024 * 1024


@dataclass(slots=True)
class PromptScores:
    """Rows of all sequences that asked, one sequence after the other.

    Attributes:
        wishes: by batch index, in the order of the rows.
        chosen: float32 [m], of each row's target token.
        top_ids: int64 [m, k of the greediest]; top_logprobs: float32, likewise.
    """

    wishes: Mapping[int, PromptWish]
    chosen: torch.Tensor
    top_ids: torch.Tensor
    top_logprobs: torch.Tensor

    def to_lists(self) -> dict[int, list[TokenLogprobs]]:
        """By batch index. Reads the tensors, which must be complete and on the host."""
        columns = (self.chosen.tolist(), self.top_ids.tolist(), self.top_logprobs.tolist())
        rows = iter(zip(*columns, strict=True))
        return {
            index: [
                TokenLogprobs(chosen, ids[: wish.k], values[: wish.k])
                for _, (chosen, ids, values) in zip(wish.targets, rows, strict=False)
            ]
            for index, wish in self.wishes.items()
        }


def score_prompt(
    hidden: torch.Tensor,
    wishes: Mapping[int, PromptWish],
    extend_lens: list[int],
    compute_logits: Callable[[torch.Tensor], torch.Tensor],
    *,
    vocab_size: int,
) -> PromptScores:
    """What the model gave each wanted token of this step's prompts.

    Args:
        hidden: [num_tokens, hidden_size], normed, all rows of the step.
        wishes: by batch index; at least one row in all.
        extend_lens: tokens of each sequence in the step.
        compute_logits: [n, hidden_size] to [n, vocab_size].
        vocab_size: decides how many rows are in memory at once.

    Raises:
        ValueError: a wish is for more rows than its sequence has in this step.
    """
    rows: list[int] = []
    targets: list[int] = []
    for index, wish in wishes.items():
        begin = sum(extend_lens[:index]) + wish.skip
        if wish.skip + len(wish.targets) > extend_lens[index]:
            raise ValueError(f"sequence {index} has no {len(wish.targets)} rows from {wish.skip}")
        rows += range(begin, begin + len(wish.targets))
        targets += wish.targets
    places = upload([rows, targets], torch.int64, hidden.device)
    k = max(wish.k for wish in wishes.values())
    step = max(1, MAX_LOGITS_BYTES // (4 * vocab_size))
    found = []
    for begin in range(0, len(rows), step):
        where, wanted = places[:, begin : begin + step]
        logits = compute_logits(hidden[where]).float()
        found.append(sampling.top_logprobs(logits, wanted, k))
    chosen, top_ids, top_logprobs = (torch.cat(parts) for parts in zip(*found, strict=True))
    return PromptScores(wishes, chosen, top_ids, top_logprobs)
