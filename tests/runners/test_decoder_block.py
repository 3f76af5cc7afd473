"""The decoder block: its MLP in chunks of rows, in place, traced and not."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from duograph.runners.layers import block
from duograph.runners.layers.block import GatedMLP, chunk_rows, gated_mlp
from duograph.runners.model_config import ModelConfig
from duograph.tests.worker_driver import tiny_config

CPU = torch.device("cpu")
ROWS = 4
Bias = torch.Tensor | None


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block, "_MIN_ROWS", ROWS)
    monkeypatch.setattr(block, "_CHUNK_BYTES", 0)


# of models of 0.6, 1 and 8 billion parameters
@pytest.mark.parametrize(("inner", "rows"), [(3072, 4096), (8192, 2048), (14336, 1024)])
def test_chunks_are_as_long_as_their_memory_allows(
    inner: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    assert chunk_rows(inner, 2) == rows
    assert rows * 3 * inner * 2 <= 96 << 20 < 2 * rows * 3 * inner * 2
    assert chunk_rows(inner, 4) == max(1024, rows // 2)


def make_mlp(config: ModelConfig) -> GatedMLP:
    mlp = GatedMLP(config, dtype=torch.float32, device=CPU)
    for parameter in mlp.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return mlp


def assert_near(mine: torch.Tensor, expected: torch.Tensor) -> None:
    """Float32; another number of rows adds up in another order."""
    torch.testing.assert_close(mine, expected, atol=1e-4, rtol=1e-4)


def parameters(mlp: GatedMLP) -> tuple[torch.Tensor, torch.Tensor, Bias, Bias]:
    gate_up, down = mlp.gate_up_proj, mlp.down_proj
    assert gate_up.weight is not None and down.weight is not None
    return gate_up.weight, down.weight, gate_up.bias, down.bias


def formula(mlp: GatedMLP, x: torch.Tensor) -> torch.Tensor:
    gate_up, down, gate_up_bias, down_bias = parameters(mlp)
    gate, up = F.linear(x, gate_up, gate_up_bias).chunk(2, dim=-1)
    return F.linear(F.silu(gate) * up, down, down_bias)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, ROWS - 1, ROWS, ROWS + 1, 2 * ROWS, 2 * ROWS + 3])
def test_any_number_of_rows_gives_what_the_formula_says(rows: int, bias: bool) -> None:
    config = tiny_config(mlp_bias=bias)
    mlp, x = make_mlp(config), torch.randn(rows, config.hidden_size)
    expected = formula(mlp, x)
    assert_near(mlp(x.clone()), expected)
    gated_mlp(x, *parameters(mlp))
    assert_near(x, expected)


def test_many_rows_are_computed_in_the_memory_of_the_input_and_few_are_not() -> None:
    mlp = make_mlp(tiny_config())
    few, many = torch.randn(ROWS, 64), torch.randn(ROWS + 1, 64)
    assert mlp(few).data_ptr() != few.data_ptr()
    assert mlp(many).data_ptr() == many.data_ptr()


@pytest.mark.slow
def test_one_trace_serves_all_numbers_of_rows() -> None:
    """A loop that the tracer unrolled would be right for the traced number only."""
    mlp, traces = make_mlp(tiny_config()), []

    def backend(module: torch.fx.GraphModule, inputs: list[object]) -> object:
        traces.append(module)
        return module.forward

    traced = torch.compile(mlp, backend=backend, fullgraph=True)
    for rows in (2, ROWS + 1, 5 * ROWS):
        x = torch.randn(rows, 64)
        torch._dynamo.mark_dynamic(x, 0)
        with torch.no_grad():
            expected = formula(mlp, x)
            assert_near(traced(x), expected)
    assert len(traces) == 1
    assert any("gated_mlp" in str(node.target) for node in traces[0].graph.nodes)
