"""A few steps of a tiny model, small enough for compute-sanitizer, which makes kernels many times
slower:

    PYTHONPATH=.src compute-sanitizer --tool memcheck --leak-check no \\
        python tests/gpu/sanitized_steps.py [--graphs] [--backend triton]

Without --graphs set PYTORCH_NO_CUDA_MEMORY_CACHING=1: every tensor is then an allocation of its
own, whose end memcheck knows. Graphs need the caching allocator, in whose large blocks only
gross mistakes are seen. Prints DONE and the steps when all results were finite.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / ".src"))

import torch

from duograph.runners.batch import SamplingBatch
from duograph.runners.config import GraphConfig
from duograph.runners.sampling_params import SamplingParams
from duograph.tests.gpu.cuda_workers import NONE, cuda_worker
from duograph.tests.worker_driver import WorkerDriver

GRAPHS = GraphConfig(cuda_graph_bs=(1, 4), piecewise_cuda_graph_tokens=(32, 128))
PREFILLS = ({1: 60}, {1: 57, 2: 40, 3: 7}, {3: 30}, {4: 1}, {5: 100})
DECODES = ([1], [1, 2, 3], [2, 3, 4, 1], [5, 4, 3, 2, 1], [4])
ROUNDS = 4  # of DECODES
WISHES = (
    SamplingBatch(),
    SamplingBatch(filtered=True),
    SamplingBatch(penalized=[0], bias={0: {3: 1.0}}, logprobs={0: 5}),
)


def run(graph: GraphConfig, backend: str, page_size: int) -> tuple[int, int]:
    """Numbers of prefill and decode steps."""
    worker = cuda_worker(
        graph,
        attention_backend=backend,
        page_size=page_size,
        max_running_requests=5,
        chunked_prefill_size=128,
        max_total_tokens=1024,
    )
    driver = WorkerDriver(worker)
    params = SamplingParams(temperature=0.8, seed=1, top_k=9, repetition_penalty=1.1)
    steps = []
    for lengths in PREFILLS:
        prompts = {row: driver.prompt(length, seed=row) for row, length in lengths.items()}
        steps.append(worker.launch(driver.extend(prompts, params=dict.fromkeys(prompts, params))))
    for index, rows in enumerate(DECODES * ROUNDS):
        steps.append(worker.launch(driver.decode(rows, WISHES[index % len(WISHES)])))
    for step in steps:
        result = step.wait()
        assert all(found.logprob <= 0.0 for found in result.logprobs.values()), "not finite"
    torch.cuda.synchronize()
    return len(PREFILLS), len(DECODES) * ROUNDS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--graphs", action="store_true")
    parser.add_argument("--backend", default="triton")
    parser.add_argument("--page-size", type=int, default=64)
    options = parser.parse_args()
    caching = os.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING", "0") == "0"
    if options.graphs and not caching:
        parser.error("--graphs needs the caching allocator")
    graph = GRAPHS if options.graphs else NONE
    prefills, decodes = run(graph, options.backend, options.page_size)
    print(f"DONE {prefills} prefill, {decodes} decode steps")


if __name__ == "__main__":
    main()
