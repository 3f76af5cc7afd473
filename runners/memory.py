"""How much memory a device has, in bytes. Knows no model and no plan."""

from __future__ import annotations

from pathlib import Path

import psutil
import torch

GIB = 1 << 30
_CGROUP = Path("/sys/fs/cgroup")


def available_bytes(device: torch.device) -> int:
    """Free memory of ``device``; on the CPU what can be taken without swapping, within the
    limit of the control group (a container's limit) if there is one."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free = int(psutil.virtual_memory().available)
    limit = _read_number("memory.max")
    used = _read_number("memory.current")
    if limit is not None and used is not None:
        free = min(free, max(0, limit - used))
    return free


def total_bytes(device: torch.device) -> int:
    """All memory of ``device``."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    return int(psutil.virtual_memory().total)


def _read_number(name: str) -> int | None:
    path = _CGROUP / name
    if not path.is_file():
        return None
    text = path.read_text().strip()
    return int(text) if text.isdigit() else None  # "max" = no limit
