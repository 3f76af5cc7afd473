"""Which attention backend each phase gets, without a GPU: the rule, the flags, and what happens
where FlashInfer cannot run."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import pytest
import torch
import torch.nn.functional as F

from duograph.kernels.attention import flashinfer_jit
from duograph.kernels.attention.base import AttentionMetadata, PhaseBackends
from duograph.kernels.attention.flashinfer_jit import FlashInferUnavailable, Kernel
from duograph.kernels.attention.torch import TorchBackend
from duograph.runners import attention_choice
from duograph.runners import worker as worker_module
from duograph.runners.attention_choice import (
    BY_LENGTH,
    choose_backends,
    create_attention,
    warm_up_long_steps,
)
from duograph.runners.config import ConfigError, GraphConfig, RunnerConfig
from duograph.tests.worker_driver import WorkerDriver, make_worker, tiny_config

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
BF16 = torch.bfloat16
MODEL = tiny_config(head_dim=128, num_heads=8, num_kv_heads=2, dtype="bfloat16")


class Named(TorchBackend):
    """Plays another backend."""

    def __init__(self, name: str) -> None:
        super().__init__(num_q_heads=8, num_kv_heads=2, head_dim=128, device=CPU)
        self.name = name


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> list[Kernel]:
    """A Hopper card on which everything works; the kernels that were to be built."""
    built: list[Kernel] = []

    def build(kernels: Iterable[Kernel], device: torch.device, progress: object) -> None:
        built.extend(kernels)

    monkeypatch.setattr(attention_choice, "cuda_capability", lambda device: 9)
    monkeypatch.setattr(flashinfer_jit, "prefill_kind", lambda device: "fa3")
    monkeypatch.setattr(flashinfer_jit, "build", build)
    monkeypatch.setattr(attention_choice, "create_backend", lambda name, **shape: Named(name))
    return built


def phases(config: RunnerConfig, head_dim: int = 128, dtype: str = "bfloat16") -> tuple[str, ...]:
    chosen = choose_backends(config, dtype, head_dim, CUDA)
    return str(chosen.prefill_attention_backend), str(chosen.decode_attention_backend)


def create(config: RunnerConfig) -> tuple[RunnerConfig, PhaseBackends]:
    resolved = choose_backends(config, "bfloat16", MODEL.head_dim, CUDA)
    return create_attention(resolved, config, MODEL, BF16, CUDA, lambda phase, done, total: None)


def extend_step(rows: int) -> AttentionMetadata:
    return AttentionMetadata(
        page_table=torch.zeros(2, 64, dtype=torch.int32),
        req_pool_indices=torch.ones(1, dtype=torch.int64),
        seq_lens=torch.tensor([rows], dtype=torch.int32),
        out_cache_loc=torch.zeros(8192, dtype=torch.int64),
        page_size=64,
        query_start_loc=torch.tensor([0, rows], dtype=torch.int32),
        num_real_tokens=rows,
    )


@pytest.mark.parametrize(
    ("capability", "head_dim", "dtype", "prefill"),
    [
        (9, 128, "bfloat16", BY_LENGTH),
        (9, 128, "float16", BY_LENGTH),
        (9, 64, "bfloat16", "triton"),
        (9, 128, "float32", "triton"),
        (8, 128, "bfloat16", "triton"),
        (10, 128, "bfloat16", "triton"),
    ],
)
def test_auto_is_what_measured_best(
    monkeypatch: pytest.MonkeyPatch, capability: int, head_dim: int, dtype: str, prefill: str
) -> None:
    monkeypatch.setattr(attention_choice, "cuda_capability", lambda device: capability)
    assert phases(RunnerConfig(), head_dim, dtype) == (prefill, "triton")


@pytest.mark.usefixtures("hopper")
def test_a_phase_flag_beats_the_flag_of_both() -> None:
    both = RunnerConfig(attention_backend="flashinfer")
    assert phases(both) == ("flashinfer", "flashinfer")
    mixed = RunnerConfig(attention_backend="flashinfer", decode_attention_backend="triton")
    assert phases(mixed) == ("flashinfer", "triton")
    auto = RunnerConfig(attention_backend="triton", prefill_attention_backend="auto")
    assert phases(auto) == (BY_LENGTH, "triton")


@pytest.mark.usefixtures("hopper")
def test_choosing_again_changes_nothing() -> None:
    once = choose_backends(RunnerConfig(), "bfloat16", 128, CUDA)
    assert choose_backends(once, "bfloat16", 128, CUDA) == once


@pytest.mark.parametrize("name", ["triton", "flashinfer"])
@pytest.mark.parametrize("phase", ["", "prefill-", "decode-"])
def test_the_cpu_refuses_kernels_of_a_gpu_and_names_the_flag(name: str, phase: str) -> None:
    field = f"{phase}attention_backend".replace("-", "_")
    with pytest.raises(ConfigError, match=f"--{phase}attention-backend {name} needs a CUDA"):
        choose_backends(RunnerConfig(**{field: name}), "float32", 64, CPU)  # type: ignore[arg-type]


def test_only_the_kernels_of_the_phases_that_use_them_are_built(hopper: list[Kernel]) -> None:
    create(RunnerConfig(attention_backend="triton"))
    assert hopper == []
    create(RunnerConfig())
    assert hopper == [Kernel("fa3", BF16, 128)]
    hopper.clear()
    create(RunnerConfig(attention_backend="flashinfer"))
    assert hopper == [Kernel("fa3", BF16, 128), Kernel("fa2", BF16, 128)]


@pytest.mark.usefixtures("hopper")
def test_auto_gives_long_steps_to_flashinfer_and_short_ones_to_triton() -> None:
    _, backends = create(RunnerConfig())
    long = 98304 // MODEL.num_heads
    names = [backends.of(extend_step(rows)).name for rows in (1, long - 1, long, 2 * long)]
    assert names == ["triton", "triton", "flashinfer", "flashinfer"]
    decode = extend_step(1)
    decode.query_start_loc = None
    assert backends.of(decode).name == "triton"


class Recording(TorchBackend):
    """Reads new rows where it can, as FlashInfer's FA3 does; by pages otherwise."""

    def __init__(self, *, num_q_heads: int, num_kv_heads: int, head_dim: int) -> None:
        super().__init__(
            num_q_heads=num_q_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, device=CPU
        )
        self.calls: list[tuple[str, int]] = []

    def extend_new_rows(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        meta: AttentionMetadata,
        out: torch.Tensor,
        scale: float,
    ) -> bool:
        assert meta.seq_lens_cpu is not None and meta.extend_lens is not None
        if meta.seq_lens_cpu.tolist() != meta.extend_lens:
            return False
        self.calls.append(("rows", sum(meta.extend_lens)))
        start = 0
        for length in meta.extend_lens:
            mine = slice(start, start + length)
            query, key, value = (part[mine].transpose(0, 1)[None] for part in (q, k, v))
            attended = F.scaled_dot_product_attention(
                query, key, value, is_causal=True, scale=scale, enable_gqa=True
            )
            out[mine] = attended[0].transpose(0, 1)
            start += length
        return True

    def extend(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        meta: AttentionMetadata,
        out: torch.Tensor,
        scale: float,
    ) -> None:
        assert meta.num_real_tokens is not None
        self.calls.append(("pages", meta.num_real_tokens))
        super().extend(q, k_cache, v_cache, meta, out, scale)


def test_long_steps_are_warmed_up_both_ways_on_the_dummy_page() -> None:
    backend = Recording(num_q_heads=8, num_kv_heads=2, head_dim=128)
    backends = PhaseBackends(decode=backend, extend=backend, long_extend=backend, long_from=99)
    table = torch.zeros(3, 4, dtype=torch.int32)
    warm_up_long_steps(backends, table, 64, MODEL, BF16)
    assert backend.calls == [("rows", 1), ("pages", 1)]
    backend.calls.clear()
    warm_up_long_steps(PhaseBackends(decode=backend, extend=backend), table, 64, MODEL, BF16)
    assert backend.calls == []


def test_long_prompts_reach_their_backend_through_the_pieces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By rows while there is no prefix and by pages behind one, with the same tokens as without."""
    shape = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 16}
    long = Recording(**shape)

    def create(resolved: RunnerConfig, *others: object) -> tuple[RunnerConfig, PhaseBackends]:
        plain = TorchBackend(**shape, device=CPU)
        return resolved, PhaseBackends(decode=plain, extend=plain, long_extend=long, long_from=20)

    def tokens() -> list[int]:
        worker = make_worker(graph=GraphConfig(disable_cuda_graph=True))
        long.calls.clear()  # what the start has run
        driver = WorkerDriver(worker)
        chunks = (driver.prompt(length, seed=length) for length in (5, 30, 25, 7))
        batches = [driver.extend({1 + i // 2: chunk}) for i, chunk in enumerate(chunks)]
        return [worker.launch(batch).wait().tokens[0] for batch in batches]

    expected = tokens()
    assert long.calls == []
    monkeypatch.setattr(worker_module, "create_attention", create)
    assert tokens() == expected
    layers = 2
    assert long.calls == [("pages", 30)] * layers + [("rows", 25)] * layers


@pytest.mark.usefixtures("hopper")
def test_an_explicit_flag_runs_every_step_on_it() -> None:
    _, backends = create(RunnerConfig(prefill_attention_backend="flashinfer"))
    assert {backends.of(extend_step(rows)).name for rows in (1, 8192)} == {"flashinfer"}


@pytest.mark.usefixtures("hopper")
def test_auto_goes_on_with_triton_and_says_why_in_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def build(*arguments: object) -> None:
        raise FlashInferUnavailable("FlashInfer builds its kernels and finds no nvcc")

    monkeypatch.setattr(flashinfer_jit, "build", build)
    with caplog.at_level(logging.WARNING):
        config, backends = create(RunnerConfig())
    assert config.prefill_attention_backend == config.decode_attention_backend == "triton"
    assert backends.of(extend_step(8192)).name == "triton"
    said = [record.getMessage() for record in caplog.records]
    assert said == [
        "prefill attention runs on Triton: FlashInfer builds its kernels and finds no nvcc"
    ]


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("config", "flag"),
    [
        (RunnerConfig(attention_backend="flashinfer"), "--attention-backend flashinfer"),
        (
            RunnerConfig(decode_attention_backend="flashinfer"),
            "--decode-attention-backend flashinfer",
        ),
    ],
)
def test_a_flag_that_asks_for_flashinfer_is_refused_without_it(
    monkeypatch: pytest.MonkeyPatch, config: RunnerConfig, flag: str
) -> None:
    def missing(name: str, **shape: object) -> TorchBackend:
        if name == "flashinfer":
            raise FlashInferUnavailable("flashinfer-python is not installed; pip install it")
        return Named(name)

    monkeypatch.setattr(attention_choice, "create_backend", missing)
    with pytest.raises(ConfigError, match=f"^{flag}: flashinfer-python is not installed"):
        create(config)


@pytest.mark.usefixtures("hopper")
def test_a_shape_without_kernels_is_refused_before_anything_is_built(
    monkeypatch: pytest.MonkeyPatch, hopper: list[Kernel]
) -> None:
    def refuse(name: str, **shape: object) -> TorchBackend:
        raise ValueError("FlashInfer runs head_dim (64, 128, 256) in bfloat16 or float16, not 80")

    monkeypatch.setattr(attention_choice, "create_backend", refuse)
    with pytest.raises(ConfigError, match=r"--attention-backend flashinfer: .* not 80"):
        create(RunnerConfig(attention_backend="flashinfer"))
    assert hopper == []
