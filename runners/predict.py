"""What a model would take on a GPU that is not here: for ``duograph plan``, never for a start.

Weights, tables and KV pages follow from shapes and are exact. Activations and graphs are
predictions from the largest tensors that live at the same time; the start measures them. One such
start (Llama of 1.2 billion parameters on an H200) took 0.22 GiB of activations, 0.51 of prefill
graphs and, in the same pool after these, 0.03 of decode graphs. Knows no flag's name and no text.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from duograph.runners.config import RunnerConfig
from duograph.runners.kv_pool import KVLayout
from duograph.runners.memory_plan import CUDA_RESERVE, MIB, pages_within
from duograph.runners.model_config import ModelConfig
from duograph.runners.request_table import RequestTable

CUDA_CONTEXT = 512 * MIB  # the driver's and the libraries' own
# Of each captured graph and piece, by layer: kernel nodes, their parameters, the driver's share.
_GRAPH_BYTES_PER_LAYER = 64 * 1024
_ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPrediction:
    """Bytes, but for ``pages`` (with the dummy page)."""

    total: int
    weights: int
    tables: int
    activations: int
    decode_graphs: int
    prefill_graphs: int
    reserve: int
    kv_pool: int
    pages: int
    bytes_per_token: int

    @property
    def kv_tokens(self) -> int:
        """Tokens that requests can hold."""
        usable = self.kv_pool - self.kv_pool // self.pages
        return usable // self.bytes_per_token


def predict_memory(config: RunnerConfig, model: ModelConfig, total: int) -> MemoryPrediction:
    """For a GPU of ``total`` bytes.

    Args:
        config: resolved for that GPU.

    Raises:
        MemoryPlanError: no room for a useful KV pool.
    """
    assert config.chunked_prefill_size is not None and config.max_running_requests is not None
    assert config.page_size is not None
    item = _ITEM_BYTES[config.dtype]
    layout = KVLayout(
        num_layers=model.num_layers,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        page_size=config.page_size,
        dtype=getattr(torch, config.dtype),
    )
    weights = model.num_parameters * item
    tables = _table_bytes(config, model)
    activations = max(
        _activation_bytes(model, config.chunked_prefill_size, 1, item),
        _activation_bytes(model, config.max_running_requests, config.max_running_requests, item),
    )
    decode, prefill = _graph_bytes(config, model, item)
    reserve = CUDA_CONTEXT + CUDA_RESERVE
    if config.max_total_tokens is not None:
        pages = -(-config.max_total_tokens // layout.page_size) + 1
    else:
        budget = total - weights - tables - activations - decode - prefill - reserve
        if config.mem_fraction_static is not None:
            used = CUDA_CONTEXT + weights + tables
            budget = min(int(total * config.mem_fraction_static), total) - used
        pages = pages_within(budget, config, layout)
    return MemoryPrediction(
        total=total,
        weights=weights,
        tables=tables,
        activations=activations,
        decode_graphs=decode,
        prefill_graphs=prefill,
        reserve=reserve,
        kv_pool=pages * layout.bytes_per_page,
        pages=pages,
        bytes_per_token=layout.bytes_per_token,
    )


def _table_bytes(config: RunnerConfig, model: ModelConfig) -> int:
    assert config.max_running_requests is not None and config.page_size is not None
    assert config.context_length is not None
    table = RequestTable(
        max_running_requests=config.max_running_requests,
        max_pages=-(-config.context_length // config.page_size),
        vocab_size=model.vocab_size,
        device=torch.device("meta"),
    )
    rotary = 4 * config.context_length * model.head_dim
    return table.nbytes + rotary


def _activation_bytes(model: ModelConfig, tokens: int, rows: int, item: int) -> int:
    """The peak of one step: the widest layer's tensors, then logits and what sorts them."""
    heads = model.num_heads + 2 * model.num_kv_heads
    width = 3 * model.hidden_size + max(model.intermediate_size, heads * model.head_dim)
    return max(tokens * width * item, rows * model.vocab_size * (item + 4))  # raw and in float32


def _graph_bytes(config: RunnerConfig, model: ModelConfig, item: int) -> tuple[int, int]:
    """(decode, prefill): the largest size's tensors once, since all share one pool, and
    something for each graph and piece. Between pieces attention's own tensors live beside those
    of the pieces."""
    graph = config.graph
    each = model.num_layers * _GRAPH_BYTES_PER_LAYER
    sizes, levels = graph.cuda_graph_bs or (), graph.piecewise_cuda_graph_tokens or ()
    decode = prefill = 0
    if not graph.disable_cuda_graph and sizes:
        decode = len(sizes) * each + sizes[-1] * model.vocab_size * item
    if not graph.disable_piecewise_cuda_graph and levels:
        prefill = len(levels) * each + 2 * _activation_bytes(model, levels[-1], 0, item)
    return decode, prefill
