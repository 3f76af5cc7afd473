"""``duograph bench structured``: what a grammar costs, engine in process.

The same requests by turns with a JSON schema of 30 fields and without, all at once; tokens/s of
both and their ratio within each round, and the ratio of the CPU time that a token took, which a
busy machine disturbs less. Then the compile time of such schemas, none seen before, and the CPU
time of a mask. The model needs its tokenizer.json.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from dataclasses import dataclass
from typing import Any

from duograph.scheduler.grammar import GrammarCompiler
from duograph.scheduler.messages import Grammar
from duograph.scheduler.offline import Generation, OfflineEngine
from duograph.server.bench.in_process import (
    add_engine_flags,
    create_engine,
    greedy,
    random_prompt,
    seconds_of,
)
from duograph.server.grammars import requested_grammar

FIELDS = 30
_KINDS: tuple[dict[str, Any], ...] = (
    {"type": "string"},
    {"type": "integer"},
    {"type": "number"},
    {"type": "boolean"},
    {"type": "array", "items": {"type": "string"}},
    {"enum": ["red", "green", "blue"]},
    {"type": ["string", "null"]},
    {"type": "string", "format": "date-time"},
    {"type": "string", "pattern": "^[A-Z]{2}[0-9]{4}$"},
    {
        "type": "object",
        "properties": {"x": {"type": "integer"}, "label": {"type": "string"}},
        "required": ["x", "label"],
        "additionalProperties": False,
    },
)


@dataclass(frozen=True)
class Speed:
    """Of one round of requests."""

    tokens_per_s: float
    cpu_s: float  # of all threads of this process, per token


@dataclass(frozen=True)
class Round:
    """The same requests without and with a grammar."""

    plain: Speed
    structured: Speed


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="duograph bench structured", description=__doc__)
    add_engine_flags(parser)
    parser.set_defaults(load_format="auto")
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--input-len", type=int, default=32)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(arguments)
    engine = create_engine(options)
    compile_ms = compile_times(engine.compiler, options.rounds)
    rounds, mask_us = measure(engine, options)
    print_figures(rounds, compile_ms, mask_us)
    return 0


def schema(seed: int) -> dict[str, Any]:
    """Of FIELDS required fields, by the names of no other seed."""
    names = [f"field_{seed}_{position}" for position in range(FIELDS)]
    return {
        "type": "object",
        "properties": {name: _KINDS[i % len(_KINDS)] for i, name in enumerate(names)},
        "required": names,
        "additionalProperties": False,
    }


def grammar(seed: int) -> Grammar:
    found = requested_grammar({"json_schema": schema(seed)})
    assert found is not None
    return found


def compile_times(compiler: GrammarCompiler, rounds: int) -> list[float]:
    """Milliseconds of each of so many schemas."""
    times = []
    for seed in range(rounds):
        wanted = grammar(-1 - seed)
        begun = time.perf_counter()
        compiler.compile(wanted)
        times.append(1e3 * (time.perf_counter() - begun))
    return times


def measure(engine: OfflineEngine, options: argparse.Namespace) -> tuple[list[Round], list[float]]:
    """The rounds, and microseconds of one CPU per mask of each request."""
    rng = random.Random(0)
    vocab_size = engine.limits.vocab_size
    prompts = [
        random_prompt(rng, options.input_len, vocab_size) for _ in range(options.concurrency)
    ]
    sampling = [greedy(options.output_len)] * len(prompts)
    wanted = [grammar(seed) for seed in range(len(prompts))]
    rounds: list[Round] = []
    mask_us: list[float] = []
    for number in range(1 + options.rounds):
        speeds = []
        results: list[Generation] = []
        for grammars in (None, wanted):
            begun = time.process_time()
            results = engine.generate(prompts, sampling, grammars)
            speeds.append(speed(results, time.process_time() - begun))
        if number:  # the first one is the warm-up
            rounds.append(Round(*speeds))
            mask_us += [
                1e6 * result.grammar.seconds / len(result.tokens)
                for result in results
                if result.grammar is not None
            ]
    return rounds, mask_us


def speed(results: list[Generation], cpu_s: float) -> Speed:
    tokens = sum(len(result.tokens) for result in results)
    return Speed(tokens / seconds_of(results), cpu_s / tokens)


def print_figures(rounds: list[Round], compile_ms: list[float], mask_us: list[float]) -> None:
    print("round  plain tokens/s  structured tokens/s  ratio  CPU ratio")
    ratios = [one.structured.tokens_per_s / one.plain.tokens_per_s for one in rounds]
    cpu_ratios = [one.plain.cpu_s / one.structured.cpu_s for one in rounds]
    for number, (one, ratio, cpu) in enumerate(zip(rounds, ratios, cpu_ratios, strict=True), 1):
        speeds = f"{one.plain.tokens_per_s:14.1f}  {one.structured.tokens_per_s:19.1f}"
        print(f"{number:5}  {speeds}  {ratio:5.3f}  {cpu:9.3f}")
    print(
        f"median ratio {statistics.median(ratios):.3f} by the clock, "
        f"{statistics.median(cpu_ratios):.3f} by CPU time"
    )
    print(
        f"compile, {FIELDS} fields: {statistics.median(compile_ms):.1f} ms "
        f"(slowest {max(compile_ms):.1f} ms); mask: {statistics.median(mask_us):.0f} us of CPU"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
