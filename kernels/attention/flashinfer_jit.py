"""FlashInfer's kernels, built before they are needed.

FlashInfer compiles at first use, which takes a minute and more. So what a server will run is
named here, looked up in FlashInfer's cache and built at the start if it is not there: never in a
request. This file knows which kernels a phase needs and neither batch, layer nor flag.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from duograph.kernels.attention import flashinfer_tools
from duograph.kernels.attention.flashinfer_tools import INSTALL, PACKAGE, find_tools

logger = logging.getLogger(__name__)

# Seconds on 16 cores of an H200 host, whose builds are about ten files that compile at once.
_BUILD_SECONDS = {"fa3": 90, "fa2": 30, "decode": 12}
_FILES = 10
_QUICK_S = 2.0  # longer than this to find a kernel up to date: it was not


class FlashInferUnavailable(RuntimeError):
    """FlashInfer cannot be used here; one sentence that says why and what helps."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """One module of FlashInfer: ``kind`` is "fa3" or "fa2" (prefill, and decode on tensor cores)
    or "decode" (without)."""

    kind: str
    dtype: torch.dtype
    head_dim: int

    @property
    def title(self) -> str:
        phase = "" if self.kind == "decode" else "prefill "
        return f"{phase}{self.kind} head_dim {self.head_dim}"

    @property
    def seconds(self) -> int:
        """What building it takes here, roughly."""
        cores = len(os.sched_getaffinity(0))
        return int(_BUILD_SECONDS[self.kind] * max(1, _FILES / cores))


def prefill_kind(device: torch.device) -> str:
    """The prefill kernels of a card: FA3 is for compute capability 9 alone."""
    return "fa3" if torch.cuda.get_device_capability(device)[0] == 9 else "fa2"


def uses_tensor_cores(group: int) -> bool:
    """Whether decode of ``group`` query heads to a KV head runs on tensor cores. Below four, most
    of a tile of 16 query rows is padding; other kernels know groups of 1, 2, 3, 4 and 8 only."""
    return group >= 4


def decode_kind(group: int) -> str:
    return "fa2" if uses_tensor_cores(group) else "decode"


def load_package(device: torch.device) -> Any:
    """The package ``flashinfer``, set up for ``device``.

    FlashInfer reads its variables when it is imported; those of the user win.

    Raises:
        FlashInferUnavailable: it is not installed, cannot be imported, or not for this card.
    """
    if not flashinfer_tools.is_installed():
        raise FlashInferUnavailable(f"{PACKAGE} is not installed; {INSTALL}")
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        raise FlashInferUnavailable(
            f"FlashInfer needs compute capability 8.0, {device} has {major}.{minor}"
        )
    suffix = "a" if major == 9 else ""
    os.environ.setdefault("FLASHINFER_CUDA_ARCH_LIST", f"{major}.{minor}{suffix}")
    # No kernel of ours is written in CUTLASS' Python language: do not load it for its norms.
    os.environ.setdefault("FLASHINFER_USE_CUDA_NORM", "1")
    os.environ.setdefault("FLASHINFER_LOGGING_LEVEL", "warning")
    try:
        import flashinfer
    except Exception as error:  # whatever a broken installation raises
        raise FlashInferUnavailable(
            f"{PACKAGE} cannot be imported ({type(error).__name__}: {error}); {INSTALL}"
        ) from error
    return flashinfer


def build(
    kernels: Iterable[Kernel],
    device: torch.device,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Makes every kernel loadable without a compiler run.

    Args:
        progress: called with the kernels done and their number if one has to be built.

    Raises:
        FlashInferUnavailable: see ``load_package``; or a tool is missing, or a build fails.
    """
    load_package(device)
    specs = [(kernel, _spec(kernel)) for kernel in dict.fromkeys(kernels)]
    specs = [(kernel, spec) for kernel, spec in specs if not spec.is_aot]
    _check_tools(any(not spec.is_compiled for _, spec in specs), bool(specs))
    unbuilt = [kernel for kernel, spec in specs if not spec.is_compiled]
    if unbuilt:
        progress(0, len(specs))
    for done, (kernel, spec) in enumerate(specs):
        _build_one(kernel, spec)
        if unbuilt:
            progress(done + 1, len(specs))


def _spec(kernel: Kernel) -> Any:
    """FlashInfer's own description, the one that its wrappers ask for."""
    from flashinfer.jit.attention import gen_batch_decode_module, gen_batch_prefill_module

    dtypes = (kernel.dtype, kernel.dtype, kernel.dtype, torch.int32)  # q, kv, out, indices
    plain = (kernel.head_dim, kernel.head_dim, 0, False, False)  # no rotation, window or soft cap
    if kernel.kind == "decode":
        return gen_batch_decode_module(*dtypes, *plain)
    return gen_batch_prefill_module(kernel.kind, *dtypes, *plain, False)


def _check_tools(to_compile: bool, any_kernel: bool) -> None:
    tools = find_tools(os.environ)
    missing = tools.missing(to_compile=to_compile) if any_kernel else []
    if missing:
        raise FlashInferUnavailable(
            f"FlashInfer builds its kernels and finds no {', no '.join(missing)} "
            "(nvcc comes with the CUDA toolkit, ninja with pip install ninja)"
        )
    if tools.ninja is not None:  # it may lie beside this Python and not on PATH
        folder = str(Path(tools.ninja).parent)
        if folder not in os.environ.get("PATH", "").split(os.pathsep):
            os.environ["PATH"] = os.pathsep.join((os.environ.get("PATH", ""), folder))


def _build_one(kernel: Kernel, spec: Any) -> None:
    was_there = spec.is_compiled
    folder = flashinfer_tools.cache_folder(os.environ)
    if not was_there:
        logger.info(
            "building FlashInfer kernels (%s), about %d s, cached in %s",
            kernel.title,
            kernel.seconds,
            folder,
        )
    started = time.monotonic()
    try:
        spec.build(verbose=False)  # asks ninja, which does nothing if all is up to date
    except Exception as error:  # of ninja, of the compiler, or of FlashInfer about either
        logger.debug("FlashInfer's build of %s failed", spec.name, exc_info=error)
        raise FlashInferUnavailable(
            f"FlashInfer kernels ({kernel.title}) cannot be built: {_first_error(str(error))}"
        ) from error
    seconds = time.monotonic() - started
    if not was_there or seconds > _QUICK_S:
        again = " again, as the package or the toolkit is another one" if was_there else ""
        logger.info("built FlashInfer kernels (%s)%s in %.0f s", kernel.title, again, seconds)


def _first_error(output: str) -> str:
    """The first line of a build's output that says what is wrong, else the last one. Command
    lines, with all their flags, are none."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    signs = ("error:", "cannot find", "not found", "No such file")
    found = next((line for line in lines if len(line) < 300 and any(s in line for s in signs)), "")
    return found or (lines[-1][:300] if lines else "no reason given")
