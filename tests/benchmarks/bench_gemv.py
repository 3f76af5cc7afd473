"""The matrix part of one decode step (no attention) at one to four rows, in one CUDA graph:
fused GEMVs against cuBLAS with the fused element-wise kernels, and the time that reading the
weights takes at the card's measured rate.

    PYTHONPATH=.src python tests/benchmarks/bench_gemv.py [--rows 1 2 4]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from duograph.kernels import fused
from duograph.kernels.gemv_triton import fused_gemv

DEVICE = torch.device("cuda")
DTYPE = torch.bfloat16
EPS = 1e-5


@dataclass(frozen=True, slots=True)
class Shape:
    name: str
    hidden: int
    layers: int
    qkv: int  # rows of the merged projection
    attended: int  # columns of the output projection
    ffn: int
    vocab: int


SHAPES = (
    Shape("llama-1b", 2048, 16, 3072, 2048, 8192, 128256),
    Shape("llama-8b", 4096, 32, 6144, 4096, 14336, 128256),
    Shape("qwen3-0.6b", 1024, 28, 4096, 2048, 3072, 151936),
)


@dataclass(slots=True)
class Weights:
    qkv: torch.Tensor
    o: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


def make_weights(shape: Shape) -> tuple[list[Weights], torch.Tensor, torch.Tensor]:
    def matrix(n: int, k: int) -> torch.Tensor:
        return torch.randn(n, k, device=DEVICE, dtype=DTYPE).mul_(k**-0.5)

    h = shape.hidden
    layers = [
        Weights(
            matrix(shape.qkv, h),
            matrix(h, shape.attended),
            matrix(2 * shape.ffn, h),
            matrix(h, shape.ffn),
        )
        for _ in range(shape.layers)
    ]
    return layers, matrix(shape.vocab, h), torch.ones(h, device=DEVICE, dtype=DTYPE)


def cublas_step(
    x: torch.Tensor, layers: list[Weights], head: torch.Tensor, norm: torch.Tensor
) -> torch.Tensor:
    residual = x
    hidden = fused.rms_norm(x, norm, EPS)
    for w in layers:
        attended = F.linear(hidden, w.qkv)[:, : w.o.shape[1]].contiguous()
        hidden, residual = fused.add_rms_norm(F.linear(attended, w.o), residual, norm, EPS)
        gated = fused.silu_and_mul(F.linear(hidden, w.gate_up))
        hidden, residual = fused.add_rms_norm(F.linear(gated, w.down), residual, norm, EPS)
    return F.linear(hidden, head)


def gemv_step(
    x: torch.Tensor,
    layers: list[Weights],
    head: torch.Tensor,
    norm: torch.Tensor,
    *,
    pdl: bool,
) -> torch.Tensor:
    call = partial(fused_gemv, pdl=pdl)
    for w in layers:
        qkv = call(x, w.qkv, norm_weight=norm, eps=EPS)
        x = call(qkv[:, : w.o.shape[1]].contiguous(), w.o, residual=x)
        gated = call(x, w.gate_up, norm_weight=norm, eps=EPS, gated=True)
        x = call(gated, w.down, residual=x)
    return call(x, head, norm_weight=norm, eps=EPS)


def graph_ms(step: Callable[[], torch.Tensor]) -> tuple[float, torch.Tensor]:
    """Median milliseconds of a replay, and the output."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    times = []
    for _ in range(7):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(20):
            graph.replay()
        end.record()
        end.synchronize()
        times.append(float(start.elapsed_time(end)) / 20)
    return sorted(times)[3], out


def read_rate() -> float:
    """Bytes per second of a reduction over 4 GiB."""
    data = torch.ones(1 << 30, device=DEVICE)
    ms, _ = graph_ms(lambda: data.sum())
    return data.numel() * 4 / ms * 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4])
    args = parser.parse_args()
    started = time.monotonic()
    rate = read_rate()
    lines = []
    for shape in SHAPES:
        weights = make_weights(shape)
        read = sum(w.numel() for layer in weights[0] for w in _all(layer)) + weights[1].numel()
        floor = read * DTYPE.itemsize / rate * 1000
        for rows in args.rows:
            x = torch.randn(rows, shape.hidden, device=DEVICE, dtype=DTYPE)
            base, wanted = graph_ms(partial(cublas_step, x, *weights))
            cells = [f"floor {floor:.3f}", f"cuBLAS {base:.3f}"]
            for pdl in (False, True):
                ms, out = graph_ms(partial(gemv_step, x, *weights, pdl=pdl))
                error = float((out - wanted).float().norm() / wanted.float().norm())
                name = "gemv + pdl" if pdl else "gemv"
                cells.append(f"{name} {ms:.3f} ({base / ms:.2f}x, error {error:.3f})")
            lines.append(f"{shape.name:<10} rows {rows} ms | " + " | ".join(cells))
        del weights
        torch.cuda.empty_cache()
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, bf16, {rate / 1e12:.2f} TB/s"
    )
    print("\n".join(lines))
    print(f"{time.monotonic() - started:.0f} s")


def _all(layer: Weights) -> tuple[torch.Tensor, ...]:
    return layer.qkv, layer.o, layer.gate_up, layer.down


if __name__ == "__main__":
    main()
