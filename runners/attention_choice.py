"""Which attention kernels each phase runs: the rule behind "auto", and what is refused.

The rule is what measured best (tests/benchmarks/h200.md). FlashInfer may be missing, or unable to
build its kernels: "auto" then goes on with Triton and says so in one line; a flag that asks for
FlashInfer is refused. This file knows no kernel and no step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

import torch

from duograph.kernels.attention import flashinfer_jit
from duograph.kernels.attention.base import AttentionBackend, AttentionMetadata, PhaseBackends
from duograph.kernels.attention.flashinfer_jit import FlashInferUnavailable, Kernel
from duograph.kernels.attention.new_rows import ExtendsNewRows
from duograph.kernels.attention.registry import create_backend
from duograph.runners.config import ConfigError, RunnerConfig
from duograph.runners.model_config import ModelConfig

logger = logging.getLogger(__name__)

BY_LENGTH = "triton+flashinfer"  # FlashInfer for the long steps; what "auto" may resolve to

_FA3_CAPABILITY = 9  # major; FlashInfer's FA3 kernels are for Hopper alone
_HALF = ("bfloat16", "float16")
# On one H200, us a layer, FlashInfer against Triton. 128 dimensions, 32/8 heads: 2048 rows 74 and
# 94, 8192 rows 911 and 1231; 16/8 heads: 2048 rows 48 and 49, 4096 rows 138 and 165. Planning a
# step takes 0.2 to 0.5 ms of the host, so that a prompt of 2048 tokens (32 heads, 32 layers) took
# the same time with both. 64 dimensions, 32/8 heads: 2048 rows 62 and 50, 8192 rows 599 and 645.
# In decode Triton is as fast or faster in most shapes and plans nothing.
_FA3_HEAD_DIM = 128
_LONG_STEP = 98304  # query rows times query heads: 3072 rows of 32 heads


def choose_backends(
    config: RunnerConfig, dtype: str, head_dim: int, device: torch.device
) -> RunnerConfig:
    """``config`` with a backend for each phase; ``attention_backend`` names the one of both, if
    it is one.

    Raises:
        ConfigError: a flag asks for kernels that ``device`` cannot run.
    """
    prefill, decode = (
        _refuse_on_cpu(*_asked(config, phase), device) or _best(phase, dtype, head_dim, device)
        for phase in ("prefill", "decode")
    )
    return replace(
        config,
        attention_backend=prefill if prefill == decode else config.attention_backend,
        prefill_attention_backend=prefill,
        decode_attention_backend=decode,
    )


def create_attention(
    resolved: RunnerConfig,
    asked: RunnerConfig,
    model: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    progress: Callable[[str, int, int], None],
) -> tuple[RunnerConfig, PhaseBackends]:
    """The backends of ``resolved``, ready to run, and the configuration that they are of: another
    one if "auto" has to do without FlashInfer.

    Args:
        asked: the configuration before it was resolved: what the user insists on.
        dtype: of queries and KV pool.
        progress: told of phase ``building_kernels`` if there are kernels to build.

    Raises:
        ConfigError: FlashInfer was asked for by a flag and cannot run here.
    """
    for phase in ("prefill", "decode"):
        if getattr(resolved, f"{phase}_attention_backend") not in ("flashinfer", BY_LENGTH):
            continue
        flag, name = _asked(asked, phase)
        try:
            _create("flashinfer", model, dtype, device)  # refuses what it has no kernels for
            _build_flashinfer(phase, model, dtype, device, progress)
        except (FlashInferUnavailable, ValueError) as error:
            if name == "flashinfer":
                raise ConfigError(f"{flag} flashinfer: {error}") from error
            logger.warning("%s attention runs on Triton: %s", phase, error)
            resolved = _with_triton(resolved, phase, model, device)
    prefill, decode = resolved.prefill_attention_backend, resolved.decode_attention_backend
    assert prefill is not None and decode is not None
    made: dict[str, AttentionBackend] = {
        name: _create(name, model, dtype, device) for name in {*prefill.split("+"), decode}
    }
    logger.info("Attention: prefill %s, decode %s", prefill, decode)
    if prefill != BY_LENGTH:
        return resolved, PhaseBackends(extend=made[prefill], decode=made[decode])
    return resolved, PhaseBackends(
        extend=made["triton"],
        decode=made[decode],
        long_extend=made["flashinfer"],
        long_from=-(-_LONG_STEP // model.num_heads),
    )


def warm_up_long_steps(
    attention: PhaseBackends,
    page_table: torch.Tensor,
    page_size: int,
    model: ModelConfig,
    dtype: torch.dtype,
) -> None:
    """Runs the backend of long steps once, on the dummy request: no other step of the start need
    be long enough to load its kernels."""
    backend, device = attention.long_extend, page_table.device
    if backend is None:
        return

    def tensor(rows: int, heads: int) -> torch.Tensor:
        return torch.zeros(rows, heads, model.head_dim, dtype=dtype, device=device)

    q, k, v = (tensor(1, n) for n in (model.num_heads, model.num_kv_heads, model.num_kv_heads))
    pool = tensor(page_size, model.num_kv_heads)
    for length in (1, 2):  # without a prefix and with one, all of it on page 0
        lengths = torch.tensor([length], dtype=torch.int32)
        meta = AttentionMetadata(
            page_table=page_table,
            req_pool_indices=torch.zeros(1, dtype=torch.int64, device=device),
            seq_lens=lengths.to(device),
            out_cache_loc=torch.zeros(1, dtype=torch.int64, device=device),
            page_size=page_size,
            query_start_loc=torch.tensor([0, 1], dtype=torch.int32, device=device),
            num_real_tokens=1,
            seq_lens_cpu=lengths,
            extend_lens=[1],
        )
        backend.prepare(meta)
        scale, out = model.head_dim**-0.5, torch.empty_like(q)
        if isinstance(backend, ExtendsNewRows):
            backend.extend_new_rows(q, k, v, meta, out, scale)
        if length > 1:
            backend.extend(q, pool, pool, meta, out, scale)


def _with_triton(
    config: RunnerConfig, phase: str, model: ModelConfig, device: torch.device
) -> RunnerConfig:
    if phase == "prefill":
        config = replace(config, prefill_attention_backend="triton")
    else:
        config = replace(config, decode_attention_backend="triton")
    return choose_backends(config, config.dtype, model.head_dim, device)


def cuda_capability(device: torch.device) -> int:
    """The major number of the compute capability."""
    return torch.cuda.get_device_capability(device)[0]


def _asked(config: RunnerConfig, phase: str) -> tuple[str, str]:
    """The flag that decides about ``phase``, and what it says."""
    own: str | None = getattr(config, f"{phase}_attention_backend")
    if own is not None:
        return f"--{phase}-attention-backend", own
    return "--attention-backend", config.attention_backend


def _refuse_on_cpu(flag: str, name: str, device: torch.device) -> str | None:
    """``name``, or None for "auto"."""
    if name in ("triton", "flashinfer") and device.type != "cuda":
        raise ConfigError(f"{flag} {name} needs a CUDA device; use torch")
    return None if name == "auto" else name


def _best(phase: str, dtype: str, head_dim: int, device: torch.device) -> str:
    if device.type != "cuda":
        return "torch"
    if phase == "prefill" and head_dim == _FA3_HEAD_DIM and dtype in _HALF:
        return BY_LENGTH if cuda_capability(device) == _FA3_CAPABILITY else "triton"
    return "triton"


def _build_flashinfer(
    phase: str,
    model: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    progress: Callable[[str, int, int], None],
) -> None:
    """Raises FlashInferUnavailable."""
    if phase == "prefill":
        kind = flashinfer_jit.prefill_kind(device)
    else:
        kind = flashinfer_jit.decode_kind(model.num_heads // model.num_kv_heads)

    def report(done: int, total: int) -> None:
        progress("building_kernels", done, total)
        if done == total:
            progress("planning_memory", 0, 0)  # what it was doing before

    flashinfer_jit.build([Kernel(kind, dtype, model.head_dim)], device, report)


def _create(
    name: str, model: ModelConfig, dtype: torch.dtype, device: torch.device
) -> AttentionBackend:
    return create_backend(
        name,
        num_q_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        device=device,
        dtype=dtype,
    )
