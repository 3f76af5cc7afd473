"""The layers of one decode step, attention included, in one CUDA graph: the separate launches
(rope_and_cache, decode) against the fused one, and the few-row output projection against cuBLAS.

    PYTHONPATH=.src python tests/benchmarks/bench_decode_layers.py [--rows 1 8 32 64 256]
        [--length 136] [--shapes llama-1b qwen3-0.6b]

At one row the projections are fused GEMVs, as in the model. Weights and pools of every layer are
its own, so nothing is served from the L2 cache. No embedding, head or sampling.
"""

from __future__ import annotations

import argparse
import itertools
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from duograph.kernels import few_rows_triton, fused
from duograph.kernels.attention.base import AttentionMetadata
from duograph.kernels.attention.fused_decode import Rotary
from duograph.kernels.attention.triton import TritonBackend
from duograph.kernels.gemv_triton import fused_gemv
from duograph.tests.benchmarks.bench_gemv import DTYPE, EPS, graph_ms

DEVICE = torch.device("cuda")
PAGE = 64


@dataclass(frozen=True, slots=True)
class Shape:
    hidden: int
    layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    qk_norm: bool


SHAPES = {
    "llama-1b": Shape(2048, 16, 32, 8, 64, 8192, False),
    "qwen3-0.6b": Shape(1024, 28, 16, 8, 128, 3072, True),
    "llama-8b": Shape(4096, 32, 32, 8, 128, 14336, False),
}


class Layers:
    """Weights, pools and one batch of ``rows`` sequences of ``length`` tokens."""

    def __init__(self, shape: Shape, rows: int, length: int) -> None:
        self.shape = shape
        heads = shape.q_heads + 2 * shape.kv_heads
        attended = shape.q_heads * shape.head_dim
        sizes = (
            (heads * shape.head_dim, shape.hidden),
            (shape.hidden, attended),
            (2 * shape.ffn, shape.hidden),
            (shape.hidden, shape.ffn),
        )
        self.weights = [[_matrix(n, k) for n, k in sizes] for _ in range(shape.layers)]
        self.norm = torch.ones(shape.hidden, device=DEVICE, dtype=DTYPE)
        head_norm = torch.ones(shape.head_dim, device=DEVICE, dtype=DTYPE)
        self.head_norm = head_norm if shape.qk_norm else None
        pages = -(-length // PAGE)
        pool = ((rows * pages + 1) * PAGE, shape.kv_heads, shape.head_dim)
        self.pools = [
            (torch.randn(pool, device=DEVICE).to(DTYPE), torch.randn(pool, device=DEVICE).to(DTYPE))
            for _ in range(shape.layers)
        ]
        table = torch.zeros(rows + 1, 512, dtype=torch.int32, device=DEVICE)
        order = torch.randperm(rows * pages, device=DEVICE).to(torch.int32) + 1
        table[1:, :pages] = order.view(rows, pages)
        last = length - 1
        self.meta = AttentionMetadata(
            page_table=table,
            req_pool_indices=torch.arange(1, rows + 1, device=DEVICE),
            seq_lens=torch.full((rows,), length, dtype=torch.int32, device=DEVICE),
            out_cache_loc=table[1:, last // PAGE].long() * PAGE + last % PAGE,
            page_size=PAGE,
        )
        self.rotary = Rotary(
            positions=torch.full((rows,), last, device=DEVICE),
            cos_sin=torch.randn(length, shape.head_dim, device=DEVICE),
            q_norm=self.head_norm,
            k_norm=self.head_norm,
            eps=EPS,
        )
        self.backend = TritonBackend(
            num_q_heads=shape.q_heads,
            num_kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            device=DEVICE,
        )
        self.x = torch.randn(rows, shape.hidden, device=DEVICE).to(DTYPE)

    def attend(self, qkv: torch.Tensor, layer: int, *, one_launch: bool) -> torch.Tensor:
        shape, turn = self.shape, self.rotary
        parts = [shape.q_heads, shape.kv_heads, shape.kv_heads]
        q, k, v = qkv.view(-1, sum(parts), shape.head_dim).split(parts, 1)
        out = torch.empty(q.shape, device=DEVICE, dtype=DTYPE)
        pool, scale = self.pools[layer], shape.head_dim**-0.5
        if one_launch:
            self.backend.decode_fused(q, k, v, turn, *pool, self.meta, out, scale)
        else:
            fused.rope_and_cache(
                q,
                k,
                v,
                turn.positions,
                turn.cos_sin,
                *pool,
                self.meta.out_cache_loc,
                q_norm=turn.q_norm,
                k_norm=turn.k_norm,
                eps=EPS,
            )
            self.backend.decode(q, *pool, self.meta, out, scale)
        return out.view(-1, shape.q_heads * shape.head_dim)

    def one_row(self, *, one_launch: bool) -> torch.Tensor:
        x, call = self.x, partial(fused_gemv, pdl=True)
        for layer, (qkv, o, gate_up, down) in enumerate(self.weights):
            projected = call(x, qkv, norm_weight=self.norm, eps=EPS)
            x = call(self.attend(projected, layer, one_launch=one_launch), o, residual=x)
            gated = call(x, gate_up, norm_weight=self.norm, eps=EPS, gated=True)
            x = call(gated, down, residual=x)
        return x

    def rows(self, *, one_launch: bool, few_rows: bool) -> torch.Tensor:
        project = few_rows_triton.few_rows_linear if few_rows else F.linear
        residual, hidden = self.x, fused.rms_norm(self.x, self.norm, EPS)
        for layer, (qkv, o, gate_up, down) in enumerate(self.weights):
            attended = self.attend(F.linear(hidden, qkv), layer, one_launch=one_launch)
            hidden, residual = fused.add_rms_norm(project(attended, o), residual, self.norm, EPS)
            gated = fused.silu_and_mul(F.linear(hidden, gate_up))
            hidden, residual = fused.add_rms_norm(F.linear(gated, down), residual, self.norm, EPS)
        return hidden


def _matrix(n: int, k: int) -> torch.Tensor:
    return torch.randn(n, k, device=DEVICE).mul_(k**-0.5).to(DTYPE)


def measure(name: str, rows: int, length: int) -> str:
    layers = Layers(SHAPES[name], rows, length)
    fits_few = 1 < rows <= few_rows_triton.MAX_ROWS and few_rows_triton.fits(
        *layers.weights[0][1].shape
    )
    cells = []
    base = 0.0
    for one_launch, few_rows in itertools.product((False, True), (False, True)):
        if few_rows and not fits_few:
            continue
        step = (
            partial(layers.one_row, one_launch=one_launch)
            if rows == 1
            else partial(layers.rows, one_launch=one_launch, few_rows=few_rows)
        )
        ms, _ = graph_ms(step)
        base = base or ms
        what = ("fused" if one_launch else "separate") + (", few-row o" if few_rows else "")
        a_layer = 1000 * (ms - base) / SHAPES[name].layers
        cells.append(f"{what} {ms:.3f} ({a_layer:+.1f} us a layer)")
    return f"{name:<10} rows {rows:3} ms | " + " | ".join(cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 64, 256])
    parser.add_argument("--length", type=int, default=136)
    parser.add_argument(
        "--shapes", nargs="+", default=["llama-1b", "qwen3-0.6b"], choices=list(SHAPES)
    )
    options = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, bf16")
    for name, rows in itertools.product(options.shapes, options.rows):
        print(measure(name, rows, options.length), flush=True)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
