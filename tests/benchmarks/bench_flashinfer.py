"""FlashInfer against Triton attention on one CUDA card: what `--attention-backend auto` rests on.

    PYTHONPATH=.src python tests/benchmarks/bench_flashinfer.py                    # both phases
    PYTHONPATH=.src python tests/benchmarks/bench_flashinfer.py --phases decode --columns triton fa2

Times are of the kernels of one layer, in a CUDA graph; FLOPs are those of the visible keys, read
rates count keys and values once. "plan" is the host's time for one `prepare`, paid once a step and
not once a layer; "call" is the host's time to launch one layer. "rows" is FA3 over the new keys
themselves, without pages. FlashInfer's kernels must be built: the first run takes minutes.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from duograph.kernels.attention.base import AttentionBackend, AttentionMetadata
from duograph.kernels.attention.new_rows import ExtendsNewRows
from duograph.kernels.attention.registry import create_backend
from duograph.tests.benchmarks.bench_attention import (
    DEVICE,
    DTYPE,
    MAX_LEN,
    Pools,
    graph_us,
    make_pools,
)

Heads = tuple[int, int, int]

HEADS: tuple[Heads, ...] = ((32, 8, 64), (32, 8, 128), (16, 8, 128))
COLUMNS = ("triton", "fa3", "fa2", "rows")
DECODE_SHAPES = tuple(itertools.product((1, 8, 64, 256), (128, 1024, 4096)))
PAGE_SIZES = (64, 16)
SECONDS = 0.06  # of replays, per figure


@dataclass(frozen=True, slots=True)
class Extend:
    """``count`` sequences of ``new`` tokens behind ``prefix`` cached ones."""

    new: int
    count: int = 1
    prefix: int = 0

    @property
    def name(self) -> str:
        prefix = f" on {self.prefix}" if self.prefix else ""
        return f"{self.count} x {self.new}{prefix}"

    def flops(self, heads: Heads) -> float:
        visible = self.new * self.prefix + self.new * (self.new + 1) / 2
        return 4 * heads[0] * heads[2] * self.count * visible


EXTENDS = (
    *(Extend(n) for n in (16, 128, 512, 1024, 2048, 4096, 8192)),
    Extend(512, count=16),
    Extend(2048, prefix=6144),
)
PAGE_CASES = (Extend(2048), Extend(8192))  # enough to see what the page size does


def backend_for(column: str, heads: Heads) -> AttentionBackend:
    q_heads, kv_heads, dim = heads
    if column == "triton":
        return create_backend(
            "triton", num_q_heads=q_heads, num_kv_heads=kv_heads, head_dim=dim, device=DEVICE
        )
    from duograph.kernels.attention.flashinfer import FlashInferBackend

    return FlashInferBackend(
        num_q_heads=q_heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        device=DEVICE,
        dtype=DTYPE,
        prefill="fa2" if column == "fa2" else "fa3",
        by_rows=column == "rows",
    )


def with_host_lengths(meta: AttentionMetadata, extend_lens: list[int] | None) -> None:
    meta.seq_lens_cpu = meta.seq_lens.cpu()
    meta.extend_lens = extend_lens


def extend_pools(case: Extend, heads: Heads, page_size: int) -> Pools:
    pools = make_pools(case.count, case.prefix + case.new, heads, page_size, extend=True)
    meta = pools.meta
    starts = torch.arange(case.count + 1, device=DEVICE, dtype=torch.int32) * case.new
    meta.query_start_loc, meta.max_extend_len = starts, case.new
    meta.out_cache_loc = torch.zeros(case.count * case.new, dtype=torch.int64, device=DEVICE)
    with_host_lengths(meta, [case.new] * case.count)
    return pools


def calls_of(
    backend: AttentionBackend, pools: Pools, tokens: int, *, extend: bool
) -> list[Callable[[], None]]:
    """One call per simulated layer."""
    q_heads, _, dim = pools.heads
    q = torch.randn(tokens, q_heads, dim, device=DEVICE, dtype=DTYPE)
    out = torch.empty_like(q)
    run = backend.extend if extend else backend.decode

    def call(k: torch.Tensor, v: torch.Tensor) -> Callable[[], None]:
        return lambda: run(q, k, v, pools.meta, out, dim**-0.5)

    return [call(k, v) for k, v in pools.layers]


def host_us(call: Callable[[], object], repeats: int = 50) -> float:
    """Median host time of one call that leaves work to the device."""
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return 1e6 * statistics.median(times)


def call_by_rows(backend: AttentionBackend, pools: Pools, tokens: int) -> Callable[[], object]:
    """The new rows lie in one tensor with the queries, as a projection leaves them."""
    assert isinstance(backend, ExtendsNewRows)
    q_heads, kv_heads, dim = pools.heads
    qkv = torch.randn(tokens, q_heads + 2 * kv_heads, dim, device=DEVICE, dtype=DTYPE)
    q, k, v = qkv.split_with_sizes((q_heads, kv_heads, kv_heads), dim=1)
    out = torch.empty(q.shape, device=DEVICE, dtype=DTYPE)
    return partial(backend.extend_new_rows, q, k, v, pools.meta, out, dim**-0.5)


def extend_rows(columns: Sequence[str], page_sizes: Sequence[int]) -> list[list[str]]:
    rows = []
    for heads, page_size, case in itertools.product(HEADS, page_sizes, EXTENDS):
        if page_size != page_sizes[0] and case not in PAGE_CASES:
            continue
        pools = extend_pools(case, heads, page_size)
        row = [f"extend {'{}/{}x{}'.format(*heads)} page {page_size} {case.name}"]
        for column in columns:
            if column == "rows" and (case.prefix or page_size != page_sizes[0]):
                continue
            backend = backend_for(column, heads)
            backend.prepare(pools.meta)
            tokens = case.count * case.new
            call = (
                call_by_rows(backend, pools, tokens)
                if column == "rows"
                else calls_of(backend, pools, tokens, extend=True)[0]
            )
            t = graph_us([call], seconds=SECONDS)
            plan = host_us(partial(backend.prepare, pools.meta))
            host = f"plan {plan:.0f}, call {host_us(call):.0f}"
            rate = case.flops(heads) / t / 1e6
            row.append(f"{column} {t:.1f} us {rate:.0f} TFLOP/s, {host}")
        rows.append(row)
        print(" | ".join(row), flush=True)
        del pools
    return rows


def decode_rows(columns: Sequence[str], page_sizes: Sequence[int]) -> list[list[str]]:
    rows = []
    for heads, page_size, (bs, length) in itertools.product(HEADS, page_sizes, DECODE_SHAPES):
        if page_size != page_sizes[0] and heads != HEADS[0]:
            continue
        pools = make_pools(bs, length, heads, page_size, extend=False)
        with_host_lengths(pools.meta, None)
        row = [f"decode {'{}/{}x{}'.format(*heads)} page {page_size} bs {bs} L {length}"]
        for column in columns:
            backend = backend_for(column, heads)
            backend.prepare(pools.meta)
            calls = calls_of(backend, pools, bs, extend=False)
            t = graph_us(calls, seconds=SECONDS)
            plan = host_us(partial(backend.prepare, pools.meta))
            row.append(f"{column} {t:.1f} us {pools.kv_bytes / t / 1e6:.2f} TB/s, plan {plan:.0f}")
        rows.append(row)
        print(" | ".join(row), flush=True)
        del pools
        torch.cuda.empty_cache()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--phases", nargs="+", default=("extend", "decode"))
    parser.add_argument("--columns", nargs="+", default=COLUMNS, choices=COLUMNS)
    parser.add_argument("--page-sizes", nargs="+", type=int, default=PAGE_SIZES)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device")
    started = time.monotonic()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {DTYPE}, table {MAX_LEN}")
    if "extend" in args.phases:
        extend_rows(args.columns, args.page_sizes)
    if "decode" in args.phases:
        # FA3 has no decode; what FlashInfer runs there is FA2 or its kernel without tensor cores.
        columns = [c for c in args.columns if c in ("triton", "fa2")]
        decode_rows(columns, args.page_sizes)
    print(f"{time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
