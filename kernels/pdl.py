"""Programmatic dependent launch: a kernel may start while the one before it still runs.

Every Triton kernel of a decode step follows one rule, which makes the overlap safe: it says at
once that the next kernel may start, and waits for the one before it (``gdc_wait``) on every
path before it reads what that wrote or writes anything. A kernel that waited has seen the end
of all kernels before it. Before the wait it may read weights and what describes the step
(positions, lengths, page table): only copies and kernels that know nothing of this write those,
and a kernel behind one of them starts when it has ended. This file knows no kernel.
"""

from __future__ import annotations

from functools import cache

import torch

_MOST_ROWS = 512  # the largest decode step


@cache
def _has_pdl(index: int) -> bool:
    return torch.cuda.get_device_capability(index) >= (9, 0)


def has_pdl(device: torch.device) -> bool:
    """True for CUDA devices of compute capability 9 and above."""
    return device.type == "cuda" and _has_pdl(device.index or 0)


def pdl_launch(device: torch.device, rows: int = 1) -> dict[str, bool]:
    """Launch options of a kernel with a ``PDL`` constexpr that works on ``rows`` rows.

    None of it in a traced forward: Inductor compiles these kernels itself, cannot see through
    the wait what a kernel writes, and knows no such launch. Nor in a long step, where early
    programs only wait in the place of those of the kernel before: RoPE over 8192 tokens took
    53 us a layer on one H200, and 34 without."""
    if torch.compiler.is_compiling() or rows > _MOST_ROWS or not has_pdl(device):
        return {"PDL": False}
    return {"PDL": True, "launch_pdl": True}


def pdl_options(pdl: bool) -> dict[str, bool]:
    """The launch options alone, of a kernel whose constexpr ``PDL`` is ``pdl``."""
    return {"launch_pdl": True} if pdl else {}
