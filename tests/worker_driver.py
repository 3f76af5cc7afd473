"""Plays the scheduler for a model worker: rows, scattered pages, batches. Shared by the tests of
the graph runners on CPU and CUDA; knows no graph."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from duograph.runners.batch import ForwardBatch, ForwardMode, RowInit, SamplingBatch
from duograph.runners.config import GraphConfig, RunnerConfig
from duograph.runners.model_config import ModelConfig
from duograph.runners.models.dummy import fill_with_dummy_weights
from duograph.runners.models.llama import CausalLM, create_model
from duograph.runners.sampling_params import SamplingParams
from duograph.runners.step_inputs import StepInputs
from duograph.runners.worker import ModelWorker

VOCAB = 97
GREEDY = SamplingParams(temperature=0.0)
# By request row: every kind of sampling.
PARAMS = {
    1: SamplingParams(temperature=0.0),
    2: SamplingParams(temperature=1.0, seed=11),
    3: SamplingParams(temperature=0.7, seed=-5),
    4: SamplingParams(temperature=1.0, seed=7, top_k=5),
    5: SamplingParams(temperature=1.3, seed=7, top_p=0.8),
    6: SamplingParams(temperature=1.0, seed=2**62, min_p=0.1),
}


def tiny_config(**changes: object) -> ModelConfig:
    """Two layers, two query heads a KV head."""
    shape: dict[str, object] = {
        "architecture": "LlamaForCausalLM",
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "context_length": 128,
        "rms_eps": 1e-5,
        "dtype": "float32",
    }
    return ModelConfig(**(shape | changes))  # type: ignore[arg-type]


def tiny_model(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> CausalLM:
    with torch.no_grad():
        model = create_model(config, dtype=dtype, device=device)
        fill_with_dummy_weights(model)
    return model


def make_worker(
    *,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    graph: GraphConfig | None = None,
    capture: bool = True,
    model_changes: dict[str, object] | None = None,
    **options: object,
) -> ModelWorker:
    """A worker over a tiny random model, captured unless told otherwise."""
    settings: dict[str, object] = {
        "page_size": 4,
        "max_running_requests": 8,
        "chunked_prefill_size": 64,
        "max_total_tokens": 1024,
    }
    config = RunnerConfig(**(settings | options), graph=graph or GraphConfig())  # type: ignore[arg-type]
    model_config = tiny_config(**(model_changes or {}))
    model = tiny_model(model_config, torch.device(device), dtype)
    worker = ModelWorker(config, model_config, model, torch.device(device))
    worker.plan_memory()
    worker.build_runners()
    if capture:
        worker.capture(lambda phase, done, total: None)
    return worker


class WorkerDriver:
    """Builds the batches of a few requests. Lengths advance when a batch is built."""

    def __init__(self, worker: ModelWorker, seed: int = 0) -> None:
        self.worker = worker
        limits = worker.limits
        self.page_size = limits.page_size
        order = torch.randperm(limits.num_pages - 1, generator=torch.Generator().manual_seed(seed))
        self._free = (order + 1).tolist()
        self._pages: dict[int, list[int]] = {}
        self._step = 0
        self.lengths: dict[int, int] = {}

    def prompt(self, length: int, seed: int = 0) -> list[int]:
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(0, VOCAB, (length,), generator=generator).tolist()

    def extend(
        self,
        chunks: dict[int, list[int]],
        *,
        params: dict[int, SamplingParams] | None = None,
        sampling: SamplingBatch | None = None,
    ) -> ForwardBatch:
        """Appends tokens to rows; a row that is new takes its parameters (greedy if absent)."""
        inits = [
            RowInit(row, given, list(tokens), [])
            for row, tokens in chunks.items()
            if row not in self.lengths
            for given in [(params or {}).get(row, GREEDY)]
        ]
        return self._batch(ForwardMode.EXTEND, chunks, inits, sampling)

    def decode(self, rows: list[int], sampling: SamplingBatch | None = None) -> ForwardBatch:
        """One more token on each of ``rows``, which the device has in ``next_tokens``."""
        return self._batch(ForwardMode.DECODE, {row: [0] for row in rows}, [], sampling)

    def start(self, lengths: dict[int, int], params: SamplingParams = GREEDY) -> None:
        """Prefills a random prompt of the given length on each row."""
        for row, length in lengths.items():
            batch = self.extend({row: self.prompt(length, seed=row)}, params={row: params})
            self.worker.launch(batch).wait()

    def _batch(
        self,
        mode: ForwardMode,
        chunks: dict[int, list[int]],
        inits: list[RowInit],
        sampling: SamplingBatch | None,
    ) -> ForwardBatch:
        """``chunks``: tokens by row; in decode only their number counts, which is 1."""
        starts = [self.lengths.get(row, 0) for row in chunks]
        written: list[int] = []  # pages
        updates: list[tuple[int, int, int]] = []
        for (row, tokens), begin in zip(chunks.items(), starts, strict=True):
            end = begin + len(tokens)
            pages = self._pages.setdefault(row, [])
            while len(pages) * self.page_size < end:
                updates.append((row, len(pages), self._free[-1]))
                pages.append(self._free.pop())
            written += pages[begin // self.page_size :]
            self.lengths[row] = end
        self._step += 1
        rows, lens = list(chunks), [self.lengths[row] for row in chunks]
        common: dict[str, Any] = {
            "page_updates": updates,
            "row_inits": [(init.row, init.sampling) for init in inits],
            "pinned": self.worker.device.type == "cuda",
        }
        if mode is ForwardMode.DECODE:
            inputs = StepInputs.decode(rows, lens, written, **common)
        else:
            ids = [np.array(tokens) for tokens in chunks.values()]
            inputs = StepInputs.extend(
                *(rows, lens, written),
                starts=starts,
                tokens=ids,
                page_size=self.page_size,
                **common,
            )
        return ForwardBatch(
            step_id=self._step,
            mode=mode,
            inputs=inputs,
            extend_lens=[len(tokens) for tokens in chunks.values()],
            row_inits=inits,
            sampling=sampling or SamplingBatch(),
        )


def generate(
    worker: ModelWorker, rows: list[int], steps: int, *, overlap: bool = False
) -> dict[int, list[int]]:
    """Tokens of requests with PARAMS of their rows. ``overlap`` launches each step before the
    result of the one before is read."""
    driver = WorkerDriver(worker)
    prompts = {row: driver.prompt(4 + row, seed=row) for row in rows}
    filtered = any(PARAMS[row].needs_filter for row in rows)
    batches = [driver.extend(prompts, params=PARAMS, sampling=SamplingBatch(filtered=filtered))]
    launched = [worker.launch(batches[0])]
    for _ in range(steps):
        if not overlap:
            launched[-1].wait()
        launched.append(worker.launch(driver.decode(rows, SamplingBatch(filtered=filtered))))
    results = [output.wait().tokens for output in launched]
    return {row: [tokens[i] for tokens in results] for i, row in enumerate(rows)}
