"""Host microseconds of what a prefill step launches eagerly: attention, the head of one row and
a draw. The device's queue is kept short, so that it is the host that is measured.

    PYTHONPATH=.src python tests/benchmarks/bench_launch.py
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch

from duograph.kernels import fused, fused_linear, sampling
from duograph.kernels.attention.base import AttentionMetadata
from duograph.kernels.attention.triton import TritonBackend

DEVICE = torch.device("cuda", 0)
DTYPE = torch.bfloat16
LAYERS, Q_HEADS, KV_HEADS, HEAD_DIM, HIDDEN, VOCAB = 28, 16, 8, 128, 1024, 151936  # qwen3-0.6b
PAGE, TOKENS = 16, 128
BURST = LAYERS  # calls between two waits for the device, as many as a step makes
ROUNDS = 60


def host_us(call: Callable[[], object], burst: int = BURST) -> tuple[float, float]:
    """Least and median over rounds of the microseconds of a call, the device not waited for."""
    for _ in range(3):
        call()
    times = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(burst):
            call()
        times.append((time.perf_counter() - start) / burst * 1e6)
    times.sort()
    return times[0], times[len(times) // 2]


def extend_call() -> Callable[[], None]:
    pages = TOKENS // PAGE
    meta = AttentionMetadata(
        page_table=torch.arange(64 * 256, dtype=torch.int32, device=DEVICE).view(64, 256) % pages,
        req_pool_indices=torch.ones(1, dtype=torch.int64, device=DEVICE),
        seq_lens=torch.full((1,), TOKENS, dtype=torch.int32, device=DEVICE),
        out_cache_loc=torch.arange(TOKENS, device=DEVICE),
        page_size=PAGE,
        query_start_loc=torch.tensor([0, TOKENS], dtype=torch.int32, device=DEVICE),
        max_extend_len=TOKENS,
        num_real_tokens=TOKENS,
    )
    qkv = torch.randn(TOKENS, Q_HEADS + 2 * KV_HEADS, HEAD_DIM, device=DEVICE, dtype=DTYPE)
    pool = torch.randn(2, TOKENS, KV_HEADS, HEAD_DIM, device=DEVICE, dtype=DTYPE)
    out = torch.empty(TOKENS, Q_HEADS, HEAD_DIM, device=DEVICE, dtype=DTYPE)
    backend = TritonBackend(
        num_q_heads=Q_HEADS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, device=DEVICE
    )
    backend.prepare(meta)
    q = qkv[:, :Q_HEADS]
    return partial(backend.extend, q, pool[0], pool[1], meta, out, HEAD_DIM**-0.5)


def sample_call() -> Callable[[], torch.Tensor]:
    rows = torch.ones(1, dtype=torch.int64, device=DEVICE)
    return partial(
        sampling.sample,
        torch.randn(1, VOCAB, device=DEVICE, dtype=DTYPE),
        temperature=torch.ones(8, device=DEVICE),
        top_k=torch.full((8,), -1, dtype=torch.int32, device=DEVICE),
        top_p=torch.ones(8, device=DEVICE),
        min_p=torch.zeros(8, device=DEVICE),
        seed=torch.arange(8, device=DEVICE),
        position=torch.full((1,), TOKENS, dtype=torch.int32, device=DEVICE),
        filtered=False,
        rows=rows,
        next_tokens=torch.zeros(8, dtype=torch.int64, device=DEVICE),
    )


def head_call() -> Callable[[], torch.Tensor]:
    x = torch.randn(1, HIDDEN, device=DEVICE, dtype=DTYPE)
    return partial(
        fused_linear.fused_linear, x, torch.randn(VOCAB, HIDDEN, device=DEVICE, dtype=DTYPE)
    )


def norm_call() -> Callable[[], torch.Tensor]:
    """A launch that Triton makes by itself, to compare."""
    x = torch.randn(TOKENS, HIDDEN, device=DEVICE, dtype=DTYPE)
    return partial(fused.rms_norm, x, torch.ones(HIDDEN, device=DEVICE, dtype=DTYPE), 1e-6)


def main() -> None:
    calls: dict[str, tuple[Callable[[], object], int]] = {
        "extend, a layer": (extend_call(), BURST),
        "head of one row": (head_call(), 4),
        "sample one row": (sample_call(), 4),
        "rms_norm, by Triton": (norm_call(), BURST),
    }
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, host us a call")
    print(f"{'':<20} {'least':>8} {'median':>8}")
    for name, (call, burst) in calls.items():
        least, median = host_us(call, burst)
        print(f"{name:<20} {least:>8.1f} {median:>8.1f}")


if __name__ == "__main__":
    main()
