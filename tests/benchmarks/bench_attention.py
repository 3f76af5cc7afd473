"""Speed of the Triton kernels on one CUDA card, each inside a CUDA graph.

    PYTHONPATH=.src python tests/benchmarks/bench_attention.py             # the table, < 2 minutes
    PYTHONPATH=.src python tests/benchmarks/bench_attention.py --sweep     # launch shapes of decode
    PYTHONPATH=.src python tests/benchmarks/bench_attention.py --flashinfer   # builds its kernels

Every call of a graph reads another layer's pool, so nothing is served from the L2 cache. Read
rates count keys and values once; FLOPs are those of the causal half.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from duograph.kernels import fused, sampling
from duograph.kernels.attention.base import AttentionMetadata
from duograph.kernels.attention.triton import TritonBackend
from duograph.kernels.attention.triton_plan import TileConfig

DEVICE = torch.device("cuda")
DTYPE = torch.bfloat16
COLD_BYTES = 400 << 20  # several times the L2 cache
MAX_LEN = 32768  # what the page table can describe, as in a served model

DECODE_SHAPES = ((1, 8192), (64, 1024), (64, 4096), (256, 1024))
HEADS = ((32, 8, 128), (32, 8, 64), (16, 8, 128))
PAGE_SIZES = (1, 16, 64)
PREFILL_LENS = (2048, 8192)
SWEEP_TILES = ((32, 2), (32, 4), (64, 4), (64, 8), (128, 4), (128, 8))  # keys, warps


@dataclass(slots=True)
class Pools:
    """One KV pool per simulated layer, and the metadata that all of them share."""

    layers: list[tuple[torch.Tensor, torch.Tensor]]
    meta: AttentionMetadata
    heads: tuple[int, int, int]
    length: int

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values that one call must read."""
        _, kv_heads, dim = self.heads
        return self.meta.seq_lens.shape[0] * self.length * kv_heads * dim * 2 * DTYPE.itemsize


def make_pools(
    bs: int, length: int, heads: tuple[int, int, int], page_size: int, *, extend: bool
) -> Pools:
    """Shuffled pages, as after some hours of service."""
    _, kv_heads, dim = heads
    pages_each = math.ceil(length / page_size)
    num_pages = bs * pages_each + 1
    shape = (num_pages * page_size, kv_heads, dim)
    layer_bytes = 2 * math.prod(shape) * DTYPE.itemsize
    count = max(2, min(24, math.ceil(COLD_BYTES / layer_bytes)))
    layers = [
        (
            torch.randn(shape, device=DEVICE, dtype=DTYPE),
            torch.randn(shape, device=DEVICE, dtype=DTYPE),
        )
        for _ in range(count)
    ]
    table = torch.zeros(bs + 1, math.ceil(MAX_LEN / page_size), dtype=torch.int32, device=DEVICE)
    pages = torch.randperm(num_pages - 1, device=DEVICE).to(torch.int32) + 1
    table[1:, :pages_each] = pages.view(bs, pages_each)
    tokens = bs * length if extend else bs
    starts = torch.arange(bs + 1, device=DEVICE, dtype=torch.int32) * length
    meta = AttentionMetadata(
        page_table=table,
        req_pool_indices=torch.arange(1, bs + 1, device=DEVICE),
        seq_lens=torch.full((bs,), length, dtype=torch.int32, device=DEVICE),
        out_cache_loc=torch.zeros(tokens, dtype=torch.int64, device=DEVICE),
        page_size=page_size,
        query_start_loc=starts if extend else None,
        max_extend_len=length if extend else 1,
    )
    return Pools(layers, meta, heads, length)


def graph_us(calls: Sequence[Callable[[], object]], *, seconds: float = 0.15) -> float:
    """Microseconds of one call: all calls are captured in one graph, which is replayed for
    about ``seconds``; the median of five rounds."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls[:2]:
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    once = _event_ms(graph, 3)
    replays = max(1, int(seconds * 1000 / 5 / max(once, 1e-3)))
    rounds = sorted(_event_ms(graph, replays) for _ in range(5))
    return 1000 * rounds[2] / len(calls)


def _event_ms(graph: torch.cuda.CUDAGraph, replays: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    start.record()
    for _ in range(replays):
        graph.replay()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / replays


def triton_backend(
    heads: tuple[int, int, int],
    *,
    target_programs: int | None = None,
    decode_tile: TileConfig | None = None,
    extend_tile: TileConfig | None = None,
) -> TritonBackend:
    q_heads, kv_heads, dim = heads
    return TritonBackend(
        num_q_heads=q_heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        device=DEVICE,
        target_programs=target_programs,
        decode_tile=decode_tile,
        extend_tile=extend_tile,
    )


def decode_us(pools: Pools, backend: TritonBackend) -> float:
    q_heads, _, dim = pools.heads
    q = torch.randn(pools.meta.seq_lens.shape[0], q_heads, dim, device=DEVICE, dtype=DTYPE)
    out = torch.empty_like(q)
    scale = dim**-0.5

    def call(k: torch.Tensor, v: torch.Tensor) -> Callable[[], None]:
        return lambda: backend.decode(q, k, v, pools.meta, out, scale)

    return graph_us([call(k, v) for k, v in pools.layers])


def extend_us(pools: Pools, backend: TritonBackend) -> float:
    q_heads, _, dim = pools.heads
    tokens = pools.meta.out_cache_loc.shape[0]
    q = torch.randn(tokens, q_heads, dim, device=DEVICE, dtype=DTYPE)
    out = torch.empty_like(q)
    k, v = pools.layers[0]
    return graph_us([lambda: backend.extend(q, k, v, pools.meta, out, dim**-0.5)])


def sdpa_us(length: int, heads: tuple[int, int, int]) -> float:
    """torch's own fused attention on contiguous, unpaged tensors."""
    q_heads, kv_heads, dim = heads
    q, k, v = (
        torch.randn(1, n, length, dim, device=DEVICE, dtype=DTYPE)
        for n in (q_heads, kv_heads, kv_heads)
    )
    return graph_us(
        [lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)]
    )


def flashinfer_decode_us(pools: Pools) -> float:
    import flashinfer

    q_heads, kv_heads, dim = pools.heads
    bs, page = pools.meta.seq_lens.shape[0], pools.meta.page_size
    pages_each = math.ceil(pools.length / page)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        torch.empty(128 << 20, dtype=torch.uint8, device=DEVICE), "NHD", use_tensor_cores=True
    )
    wrapper.plan(
        torch.arange(bs + 1, dtype=torch.int32, device=DEVICE) * pages_each,
        pools.meta.page_table[1:, :pages_each].flatten(),
        torch.full((bs,), pools.length - (pages_each - 1) * page, dtype=torch.int32),
        q_heads,
        kv_heads,
        dim,
        page,
        q_data_type=DTYPE,
        kv_data_type=DTYPE,
    )
    q = torch.randn(bs, q_heads, dim, device=DEVICE, dtype=DTYPE)

    def call(k: torch.Tensor, v: torch.Tensor) -> Callable[[], object]:
        paged = (k.view(-1, page, kv_heads, dim), v.view(-1, page, kv_heads, dim))
        return lambda: wrapper.run(q, paged)

    return graph_us([call(k, v) for k, v in pools.layers])


def decode_rows(flashinfer: bool) -> list[list[str]]:
    rows = []
    for heads, (bs, length) in itertools.product(HEADS, DECODE_SHAPES):
        for page_size in PAGE_SIZES:
            pools = make_pools(bs, length, heads, page_size, extend=False)
            times = [decode_us(pools, triton_backend(heads))]
            if flashinfer:
                times.append(flashinfer_decode_us(pools))
            cells = [f"{t:.1f} us, {pools.kv_bytes / t / 1e6:.2f} TB/s" for t in times]
            rows.append([f"decode {_heads(heads)} bs {bs} L {length} page {page_size}", *cells])
            del pools
        torch.cuda.empty_cache()
    return rows


def prefill_rows() -> list[list[str]]:
    rows = []
    for heads, length in itertools.product(HEADS[:2], PREFILL_LENS):
        flops = 4 * heads[0] * heads[2] * length * (length + 1) / 2
        cells = []
        for page_size in (1, 16, 64):
            pools = make_pools(1, length, heads, page_size, extend=True)
            t = extend_us(pools, triton_backend(heads))
            cells.append(f"page {page_size}: {t:.0f} us, {flops / t / 1e6:.0f} TFLOP/s")
        t = sdpa_us(length, heads)
        cells.append(f"sdpa {t:.0f} us, {flops / t / 1e6:.0f} TFLOP/s")
        rows.append([f"prefill {_heads(heads)} L {length}", "; ".join(cells)])
    return rows


def fused_rows() -> list[list[str]]:
    """Each chain for a llama-8b layer, in microseconds."""
    hidden, ffn, (q_heads, kv_heads, dim) = 4096, 14336, (32, 8, 128)
    weight = torch.ones(hidden, device=DEVICE, dtype=DTYPE)
    cos_sin = torch.randn(8192, dim, device=DEVICE)
    rows = []
    for tokens in (1, 64, 2048):
        x = torch.randn(tokens, hidden, device=DEVICE, dtype=DTYPE)
        gate_up = torch.randn(tokens, 2 * ffn, device=DEVICE, dtype=DTYPE)
        total = q_heads + 2 * kv_heads
        qkv = torch.randn(tokens, total, dim, device=DEVICE, dtype=DTYPE)
        q, k, v = qkv.split([q_heads, kv_heads, kv_heads], 1)
        pool = torch.zeros(2, tokens + 1, kv_heads, dim, device=DEVICE, dtype=DTYPE)
        where = torch.arange(tokens, device=DEVICE)
        rope = (q, k, v, where, cos_sin, pool[0], pool[1], where)
        chains: dict[str, Callable[[], object]] = {
            "rms_norm": partial(fused.rms_norm, x, weight, 1e-5),
            "add_rms_norm": partial(fused.add_rms_norm, x, x, weight, 1e-5),
            "silu_and_mul": partial(fused.silu_and_mul, gate_up),
            "rope_and_cache": partial(fused.rope_and_cache, *rope),
            "a copy, for scale": partial(torch.clone, x),
        }
        cells = [f"{name} {graph_us([chain] * 20):.2f}" for name, chain in chains.items()]
        rows.append([f"fused, {tokens} tokens, us", ", ".join(cells)])
    return rows


def sampling_rows() -> list[list[str]]:
    """One call over llama's vocabulary, in microseconds, beside torch's sort of the logits."""
    vocab = 128256
    rows = []
    for n in (1, 64, 256):
        logits = torch.randn(n, vocab, device=DEVICE) * 3
        full = {"temperature": 0.7, "top_p": 1.0, "min_p": 0.0}
        options = {name: torch.full((n,), value, device=DEVICE) for name, value in full.items()}
        options["top_k"] = torch.full((n,), -1, dtype=torch.int32, device=DEVICE)
        options["seed"] = options["position"] = torch.arange(n, device=DEVICE)
        variants: dict[str, dict[str, torch.Tensor]] = {
            "greedy": options | {"temperature": torch.zeros(n, device=DEVICE)},
            "plain": options,
            "top_k 50": options | {"top_k": torch.full_like(options["top_k"], 50)},
            "top_p 0.9": options | {"top_p": torch.full((n,), 0.9, device=DEVICE)},
        }
        cells = []
        for name, variant in variants.items():
            filtered = name.startswith("top")
            call = partial(sampling.sample, logits, **variant, filtered=filtered)
            cells.append(f"{name} {graph_us([call] * 4):.1f}")
        cells.append(f"torch.sort {graph_us([partial(torch.sort, logits)]):.1f}")
        rows.append([f"sampling, {n} rows, us", ", ".join(cells)])
    return rows


def sweep() -> list[list[str]]:
    """The five best launch shapes of decode, and the best of extend, for each problem."""
    tiles = [TileConfig(n, w, s) for n, w in SWEEP_TILES for s in (2, 3, 4)]
    per_sm = torch.cuda.get_device_properties(DEVICE).multi_processor_count
    rows = []
    for heads, (bs, length) in itertools.product(HEADS[:2], DECODE_SHAPES):
        pools = make_pools(bs, length, heads, 16, extend=False)
        results = []
        for tile, waves in itertools.product(tiles, (2, 3, 4, 8)):
            backend = triton_backend(heads, target_programs=waves * per_sm, decode_tile=tile)
            try:
                results.append((decode_us(pools, backend), tile, waves))
            except Exception as error:  # a tile that does not fit is a result, too
                print(f"{tile} x{waves}: {type(error).__name__}: {error}", file=sys.stderr)
        results.sort(key=lambda r: r[0])
        for t, tile, waves in results[:5]:
            shape = f"n {tile.block_n} warps {tile.num_warps} stages {tile.num_stages} x{waves}"
            rate = pools.kv_bytes / t / 1e6
            name = f"decode {_heads(heads)} bs {bs} L {length}"
            rows.append([name, f"{t:.1f} us, {rate:.2f} TB/s, {shape}"])
    for heads, length in itertools.product(HEADS[:2], PREFILL_LENS):
        rows += _sweep_extend(heads, length)
    return rows


def _sweep_extend(heads: tuple[int, int, int], length: int) -> list[list[str]]:
    shapes = ((64, 64, 4), (128, 64, 4), (128, 64, 8), (128, 128, 8), (128, 32, 8), (256, 64, 8))
    pools = make_pools(1, length, heads, 16, extend=True)
    flops = 4 * heads[0] * heads[2] * length * (length + 1) / 2
    results = []
    for (m, n, warps), stages in itertools.product(shapes, (2, 3, 4)):
        tile = TileConfig(block_m=m, block_n=n, num_warps=warps, num_stages=stages)
        try:
            results.append((extend_us(pools, triton_backend(heads, extend_tile=tile)), tile))
        except Exception as error:
            print(f"{tile}: {type(error).__name__}: {error}", file=sys.stderr)
    results.sort(key=lambda r: r[0])
    return [
        [f"prefill {_heads(heads)} L {length}", f"{t:.0f} us, {flops / t / 1e6:.0f} TFLOP/s {tile}"]
        for t, tile in results[:4]
    ]


def _heads(heads: tuple[int, int, int]) -> str:
    return "{}/{}x{}".format(*heads)


def print_table(rows: list[list[str]]) -> None:
    width = max(len(row[0]) for row in rows)
    for row in rows:
        print(f"{row[0]:<{width}} | " + " | ".join(row[1:]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sweep", action="store_true", help="try launch shapes instead")
    parser.add_argument("--flashinfer", action="store_true", help="a second column for decode")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device")
    started = time.monotonic()
    if args.sweep:
        rows = sweep()
    else:
        rows = decode_rows(args.flashinfer) + prefill_rows() + fused_rows() + sampling_rows()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, bf16")
    print_table(rows)
    print(f"{time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
