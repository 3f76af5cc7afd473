"""Grammars on the device: masks reach the right rows before they are sampled, although the host
makes them while the forward runs."""

from __future__ import annotations

import pytest
import torch

from duograph.kernels import bitmask
from duograph.runners.config import GraphConfig
from duograph.scheduler.config import SchedulerConfig
from duograph.tests.scheduler.test_grammar_masks import create_engine, run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [97, 49_152, 128_256, 151_936])
def test_the_kernel_masks_as_the_definition_does(vocab: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(9, vocab, generator=generator).to(dtype)
    index = torch.tensor([8, 0, 3, 3, 7])
    words = bitmask.bitmask_words(vocab)
    bits = torch.randint(-(2**31), 2**31 - 1, (5, words), generator=generator).to(torch.int32)
    expected = bitmask.masked_logits(logits, index, bits)
    found = bitmask.masked_logits(logits.cuda(), index.cuda(), bits.cuda())
    assert torch.equal(found.cpu(), expected)


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
def test_every_token_is_allowed_by_those_before_it_with_overlap_and_without(graphs: bool) -> None:
    none = GraphConfig(disable_cuda_graph=True, disable_piecewise_cuda_graph=True)
    graph = GraphConfig() if graphs else none
    tokens = []
    for overlap in (True, False):
        config = SchedulerConfig(disable_overlap_schedule=not overlap)
        engine = create_engine(scheduler=config, graph=graph, device="cuda")
        tokens.append(run(engine))  # checks each token of each constrained row
    assert tokens[0] == tokens[1]
