"""Where the device time of one step goes: kernels by name with count, time, bytes and rate, and
what is idle between two decode replays.

    PYTHONPATH=.src python tests/benchmarks/profile_step.py --model-path MODEL_FOLDER
        [--decode 1 64 256] [--prefill 512 8192] [--timeline]

The engine runs in process with dummy weights; the profiler records device activities only. A
step ends with the kernel that picks its tokens. Figures are medians over the steps looked at.
A decode GEMM is rated by the bytes of its weights, a prefill GEMM by its floating-point
operations; norms, SiLU and RoPE of a prefill by the bytes that they must read and write.
"""

from __future__ import annotations

import argparse
import itertools
import random
import re
import statistics
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from duograph.runners.model_config import ModelConfig
from duograph.scheduler.offline import OfflineEngine
from duograph.server.bench.in_process import add_engine_flags, create_engine, greedy, random_prompt

LAST_OF_STEP = "_pick_kernel"
DECODE_TOKENS = 48
IS_GEMM = re.compile(r"nvjet|gemm|cutlass|gemv|gemvx|xmma|few_rows", re.IGNORECASE)
IS_REDUCTION = re.compile(r"splitk.*reduce|reduce.*splitk", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Activity:
    name: str
    start: float  # us
    end: float


def record(engine: OfflineEngine, prompts: list[list[int]], tokens: int) -> list[Activity]:
    """Everything the device did for ``prompts``, by start."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        engine.generate(prompts, [greedy(tokens)] * len(prompts))
        torch.cuda.synchronize()
    raw: Any = profiler.profiler
    found = [
        Activity(
            event.name(), event.start_ns() / 1e3, (event.start_ns() + event.duration_ns()) / 1e3
        )
        for event in raw.kineto_results.events()
        if event.device_type() == torch._C._autograd.DeviceType.CUDA and event.duration_ns() > 0
    ]
    return sorted(found, key=lambda activity: activity.start)


def steps_of(activities: list[Activity]) -> list[list[Activity]]:
    """From behind one picking kernel to the next one, that included."""
    steps: list[list[Activity]] = [[]]
    for activity in activities:
        steps[-1].append(activity)
        if activity.name.startswith(LAST_OF_STEP):
            steps.append([])
    return steps[:-1]


def idle_us(step: list[Activity], before: float) -> tuple[float, float]:
    """(all idle time since ``before``, the longest stretch)."""
    gaps, busy_until = [0.0], before
    for activity in step:
        gaps.append(max(0.0, activity.start - busy_until))
        busy_until = max(busy_until, activity.end)
    return sum(gaps), max(gaps)


def weight_bytes(config: ModelConfig) -> dict[str, int]:
    """bf16 bytes of each projection of one layer and of the head."""
    heads = config.num_heads * config.head_dim
    kv = config.num_kv_heads * config.head_dim
    size, ffn = config.hidden_size, config.intermediate_size
    return {
        "qkv": 2 * size * (heads + 2 * kv),
        "o": 2 * heads * size,
        "gate_up": 4 * size * ffn,
        "down": 2 * ffn * size,
        "lm_head": 2 * config.vocab_size * size,
    }


def prefill_bytes(config: ModelConfig, tokens: int) -> dict[str, int]:
    """bf16 bytes that each element-wise kernel moves in one layer of a step of ``tokens``."""
    heads = config.num_heads * config.head_dim
    kv = config.num_kv_heads * config.head_dim
    return {
        "_norm_kernel": 2 * 4 * tokens * config.hidden_size,
        "_silu_and_mul_kernel": 2 * 3 * tokens * config.intermediate_size,
        # q and k are rotated in place, k and v go to the pool
        "_rope_and_cache_kernel": 2 * tokens * (2 * heads + 3 * kv + 2 * kv),
    }


def is_gemm(activity: Activity) -> bool:
    name = activity.name
    return bool(IS_GEMM.search(name)) and not IS_REDUCTION.search(name)


def labelled(step: list[Activity], config: ModelConfig) -> list[tuple[str, Activity]]:
    """GEMMs by their place in the layer: kernels of one projection share no name. A long prefill
    computes the two of the MLP in several chunks of rows."""
    result = []
    seen = 0
    per_layer = sum(map(is_gemm, step)) // config.num_layers
    places = ["qkv", "o", *["gate_up", "down"] * max(1, (per_layer - 2) // 2)]
    for activity in step:
        label = activity.name.split("<")[0].split("(")[0].removeprefix("void ").split("::")[-1]
        if is_gemm(activity):
            in_layer = seen < len(places) * config.num_layers
            place = places[seen % len(places)] if in_layer else "lm_head"
            label = f"GEMM {place} ({label[:34]})"
            seen += 1
        result.append((label, activity))
    return result


def rate(label: str, total: float, count: float, config: ModelConfig, tokens: int) -> str:
    """``total`` us of ``count`` calls as a rate; ``tokens`` is 0 for decode."""
    place = label.split()[1] if label.startswith("GEMM") else ""
    weights = weight_bytes(config).get(place, 0)
    if weights and (not tokens or place == "lm_head"):
        return f"{weights / 1e6:8.1f} MB | {weights * count / total / 1e6:6.2f} TB/s"
    if weights:
        operations = weights * tokens * config.num_layers  # 2 operations a weight of 2 bytes
        return f"{operations / 1e9:8.1f} GF | {operations / total / 1e6:6.0f} TFLOP/s"
    moved = prefill_bytes(config, tokens).get(label, 0) * config.num_layers if tokens else 0
    moved *= 2 if label == "_norm_kernel" else 1
    return f"{moved / 1e6:8.1f} MB | {moved / total / 1e6:6.2f} TB/s" if moved else ""


def print_table(steps: list[list[Activity]], config: ModelConfig, tokens: int = 0) -> None:
    """``tokens``: of a prefill step; 0 for decode."""
    by_label: dict[str, list[list[float]]] = {}
    for step in steps:
        durations: dict[str, list[float]] = {}
        for label, activity in labelled(step, config):
            durations.setdefault(label, []).append(activity.end - activity.start)
        for label, values in durations.items():
            by_label.setdefault(label, []).append(values)
    rows = []
    for label, samples in by_label.items():
        count = statistics.median(len(values) for values in samples)
        total = statistics.median(sum(values) for values in samples)
        numbers = f"{count:5.0f} | {total / count:7.2f} | {total:8.1f}"
        text = f"{label[:64]:<64} | {numbers} | {rate(label, total, count, config, tokens)}"
        rows.append((total, text))
    print(f"{'kernel':<64} | count | us each |   us all | weights or work | rate")
    for _, row in sorted(rows, reverse=True):
        print(row)


def report(
    title: str,
    steps: list[list[Activity]],
    config: ModelConfig,
    timeline: bool,
    tokens: int = 0,
) -> None:
    spans, idles, longest = [], [], []
    for before, step in itertools.pairwise(steps):
        idle, gap = idle_us(step, before[-1].end)
        spans.append(step[-1].end - before[-1].end)
        idles.append(idle)
        longest.append(gap)
    print(f"\n== {title}: {len(spans)} steps")
    if spans:
        print(
            f"step {statistics.median(spans):.1f} us, idle {statistics.median(idles):.1f} us, "
            f"longest idle stretch {statistics.median(longest):.1f} us"
        )
    print_table(steps[1:] or steps, config, tokens)
    if timeline and len(steps) > 1:
        print_timeline(steps[len(steps) // 2 - 1], steps[len(steps) // 2])


def print_timeline(before: list[Activity], step: list[Activity], count: int = 28) -> None:
    """The first activities of a step: what lies between two replays, and one layer."""
    start = until = before[-1].end
    print("after the last pick, us | idle before | us | name")
    for activity in step[:count]:
        idle, took = activity.start - until, activity.end - activity.start
        print(f"{activity.start - start:8.1f} | {idle:6.1f} | {took:6.1f} | {activity.name[:70]}")
        until = activity.end


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_engine_flags(parser)
    parser.add_argument("--decode", type=int, nargs="*", default=[1, 64, 256])
    parser.add_argument("--prefill", type=int, nargs="*", default=[512, 8192])
    parser.add_argument("--timeline", action="store_true")
    options = parser.parse_args()
    config = ModelConfig.from_folder(options.model_path)
    engine = create_engine(options)
    rng = random.Random(0)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {options.model_path}")
    for batch in options.decode:
        prompts = [random_prompt(rng, 64, config.vocab_size) for _ in range(batch)]
        engine.generate(prompts, [greedy(8)] * batch)
        steps = steps_of(record(engine, prompts, DECODE_TOKENS))
        report(f"decode, batch {batch}", steps[-32:-2], config, options.timeline)
    for length in options.prefill:
        prompts = [random_prompt(rng, length, config.vocab_size)]
        engine.generate(prompts, [greedy(1)])
        steps = [steps_of(record(engine, prompts, 1))[0] for _ in range(3)]
        for step in steps:
            first, last = step[0].start, step[-1].end
            idle, _ = idle_us(step, first)
            print(f"\nprefill {length}: {last - first:.0f} us on the device, idle {idle:.0f} us")
        report(f"prefill, {length} tokens", steps[-1:], config, False, tokens=length)
        if options.timeline:
            print_timeline(steps[-1][:1], steps[-1][1:])


if __name__ == "__main__":
    main()
