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
from duograph.kernels.attention.base import AttentionBackend, PhaseBackends
from duograph.kernels.attention.flashinfer_jit import FlashInferUnavailable, Kernel
from duograph.kernels.attention.registry import create_backend
from duograph.runners.config import ConfigError, RunnerConfig
from duograph.runners.model_config import ModelConfig

logger = logging.getLogger(__name__)

_FA3_CAPABILITY = 9  # major; FlashInfer's FA3 kernels are for Hopper alone
_FA3_HEAD_DIMS = (64, 128)
_HALF = ("bfloat16", "float16")


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
        if getattr(resolved, f"{phase}_attention_backend") != "flashinfer":
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
    names = (resolved.prefill_attention_backend, resolved.decode_attention_backend)
    assert names[0] is not None and names[1] is not None
    made: dict[str, AttentionBackend] = {
        name: _create(name, model, dtype, device) for name in names if name is not None
    }
    logger.info("Attention: prefill %s, decode %s", *names)
    return resolved, PhaseBackends(extend=made[names[0]], decode=made[names[1]])


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
    fa3 = (
        cuda_capability(device) == _FA3_CAPABILITY and dtype in _HALF and head_dim in _FA3_HEAD_DIMS
    )
    return "flashinfer" if phase == "prefill" and fa3 else "triton"


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
