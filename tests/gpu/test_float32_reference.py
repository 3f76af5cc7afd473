"""Both graph runners in bfloat16 against the plain float32 forward on the CPU: no farther from it
than rounding explains."""

from __future__ import annotations

import pytest
import torch

from duograph.runners.batch import ForwardBatch
from duograph.runners.config import GraphConfig
from duograph.runners.worker import ModelWorker
from duograph.tests.gpu.cuda_workers import GRAPH_BACKENDS, cuda_worker
from duograph.tests.graph_checks import model_of, on_stream, runners_of
from duograph.tests.plain_llama import PlainLlama, RoundingBound
from duograph.tests.worker_driver import WorkerDriver

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
# by group of query heads to a KV head: 3, 2, 8 and 4
VARIANTS: dict[str, dict[str, object]] = {
    "llama": {"num_layers": 6},
    "qwen3": {"num_layers": 4, "qk_norm": True, "head_dim": 128, "num_heads": 4},
    "qwen2": {"num_layers": 4, "qkv_bias": True, "num_heads": 8, "num_kv_heads": 1},
    "tied": {"num_layers": 3, "tie_word_embeddings": True, "num_heads": 8},
}
SETTINGS: dict[str, object] = {"vocab_size": 512, "context_length": 1024}
LENGTHS = {1: 700, 2: 5, 3: 97, 4: 260}
DECODED = 6
DECODE_SIZES = (1, 2, 4, 20)
VOCAB_USED = 97


def sequences() -> dict[int, list[int]]:
    generator = torch.Generator().manual_seed(3)
    return {
        row: torch.randint(0, VOCAB_USED, (length,), generator=generator).tolist()
        for row, length in LENGTHS.items()
    }


def step_logits(worker: ModelWorker, batch: ForwardBatch) -> torch.Tensor:
    """float32 [bs, vocab], on the host, of the runner that serves ``batch``."""
    runners = runners_of(worker)
    with torch.no_grad(), on_stream(worker):
        runner = runners.pick_runner(batch)
        assert runner is not runners.eager
        return runner.run(batch).logits.to("cpu", torch.float32, copy=True)


def force(worker: ModelWorker, tokens: dict[int, int]) -> None:
    """What the next decode step of each row reads, in place of what was sampled."""
    table = runners_of(worker).parts.table
    with torch.no_grad(), on_stream(worker):
        for row, token in tokens.items():
            table.next_tokens[row] = token


def measured_logits(worker: ModelWorker) -> dict[tuple[int, int], torch.Tensor]:
    """By row and position: prefill whole and in chunks, then decode steps of four rows and of
    one, the sequences' own tokens fed to all of them."""
    driver, ids = WorkerDriver(worker), sequences()
    found: dict[tuple[int, int], torch.Tensor] = {}

    def note(rows: list[int], batch: ForwardBatch) -> None:
        for row, logits in zip(rows, step_logits(worker, batch), strict=True):
            found[row, driver.lengths[row] - 1] = logits

    prompts = {row: tokens[: -2 * DECODED] or tokens[:1] for row, tokens in ids.items()}
    chunks = [
        {1: prompts[1][:256]},
        {1: prompts[1][256:500], 2: prompts[2]},
        {1: prompts[1][500:], 3: prompts[3][:56]},
        {3: prompts[3][56:], 4: prompts[4][:200]},
        {4: prompts[4][200:]},
    ]
    for chunk in chunks:
        note(list(chunk), driver.extend(chunk))
    for rows in ([1, 3, 4], [1]):
        for _ in range(DECODED):
            force(worker, {row: ids[row][driver.lengths[row]] for row in rows})
            note(rows, driver.decode(rows))
    return found


def check_against_float32(worker: ModelWorker) -> None:
    """Fills in norms and biases, which dummy weights leave at ones and zeros, and compares."""
    model = model_of(worker)
    generator = torch.Generator(device=worker.device).manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0.0, 0.5, generator=generator)
            elif "norm" in name:
                parameter.uniform_(0.5, 1.5, generator=generator)
    torch.cuda.synchronize()
    reference = PlainLlama.of(model)
    measured = measured_logits(worker)
    assert len(measured) == 8 + 4 * DECODED
    exact, rounded = (
        {row: reference.logits(ids, rounded=is_rounded) for row, ids in sequences().items()}
        for is_rounded in (False, True)
    )
    every = torch.cat(list(exact.values()))
    bound = RoundingBound.measure(every, torch.cat(list(rounded.values())))
    assert bound.rms < 0.05 * every.std(), "rounding alone would hide a mistake"
    at = list(measured)
    wanted = torch.stack([exact[row][position] for row, position in at])
    bound.check(torch.stack([measured[key] for key in at]), wanted)


@pytest.mark.parametrize("backend", GRAPH_BACKENDS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_both_phases_stay_within_the_rounding_of_bfloat16(variant: str, backend: str) -> None:
    worker = cuda_worker(
        GraphConfig(cuda_graph_bs=DECODE_SIZES),
        model=SETTINGS | VARIANTS[variant],
        attention_backend=backend,
    )
    check_against_float32(worker)


def test_compiled_pieces_and_decode_steps_do_too() -> None:
    graph = GraphConfig(
        cuda_graph_bs=DECODE_SIZES,
        piecewise_cuda_graph_tokens=(16, 64, 256),
        piecewise_cuda_graph_compiler="inductor",
        enable_torch_compile=True,
        torch_compile_max_bs=4,
    )
    check_against_float32(cuda_worker(graph, model=SETTINGS | {"num_layers": 3}))
