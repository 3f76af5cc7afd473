"""The forward of a one-row decode step, whose projections have their neighbours folded in: wired
as the plain forward is. The kernel itself is tests/gpu's; here a twin of a few ops stands in."""

from __future__ import annotations

import pytest
import torch

from duograph.kernels import fused, fused_linear
from duograph.runners.models.llama import CausalLM
from duograph.tests.paged_session import PagedSession
from duograph.tests.worker_driver import tiny_config, tiny_model

CPU = torch.device("cpu")


def twin(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    norm_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    gated: bool = False,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    assert x.shape[0] == 1
    product = (x if norm_weight is None else fused.rms_norm(x, norm_weight, eps)) @ weight.T
    product = fused.silu_and_mul(product) if gated else product
    return product if residual is None else product + residual


def model(**changes: object) -> CausalLM:
    return tiny_model(tiny_config(**changes), CPU, torch.float32)


@pytest.mark.parametrize("qk_norm", [False, True])
def test_it_computes_what_the_plain_forward_computes(
    qk_norm: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused_linear, "fused_linear", twin)
    tested = model(qk_norm=qk_norm)
    prompt, following = [5, 1, 90, 7, 33], [3, 88, 12]
    results = []
    for forward in (tested.model.forward, tested.model.forward_row):
        session = PagedSession(tested, device=CPU, backend="torch", page_size=4)
        session.extend({1: prompt})
        with monkeypatch.context() as patch:
            patch.setattr(tested.model, "forward", forward)
            results.append(torch.cat([session.decode({1: token}) for token in following]))
    torch.testing.assert_close(results[1], results[0])


def test_it_is_asked_for_at_one_row_and_only_where_the_kernel_can_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = model()
    assert plain.decode_forward(1) is plain.model  # no such kernel on CPU
    monkeypatch.setattr(fused_linear, "is_available", lambda weight: True)
    able = model()
    assert able.decode_forward(1) == able.model.forward_row
    assert able.decode_forward(2) is able.model
    biased = model(qkv_bias=True)
    assert biased.decode_forward(1) is biased.model


def test_the_output_projection_of_few_rows_has_its_own_kernel_in_decode_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tested = model()
    results: list[torch.Tensor] = []
    taken: list[int] = []

    def few_rows(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        taken.append(len(x))
        return x @ weight.T

    monkeypatch.setattr(fused_linear, "few_rows_linear", few_rows)
    for suits in (False, True):
        monkeypatch.setattr(
            fused_linear, "suits_few_rows", lambda weight, rows, suits=suits: suits and rows == 2
        )
        session = PagedSession(tested, device=CPU, backend="torch", page_size=4)
        logits = [session.extend({1: [5], 2: [90]}), session.extend({1: [5, 1], 2: [4]})]
        logits += [session.decode({1: 3, 2: 8}), session.decode({1: 3})]
        results.append(torch.cat(logits))
    torch.testing.assert_close(results[1], results[0])
    assert taken == [2] * tested.config.num_layers
