"""The tensors of a folder of safetensors files, one after the other.

Which file holds which tensor comes from the index if there is one, else from the files
themselves. Knows no model: names and tensors only. Nothing that could run code is ever read.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from duograph.runners.config_file import ConfigFile, ModelError

INDEX_NAME = "model.safetensors.index.json"
_PICKLED = (".bin", ".pt", ".pth", ".ckpt")


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files to read, in name order.

    Raises:
        ModelError: there is none, or the index names a file that is missing or elsewhere.
    """
    index = folder / INDEX_NAME
    if index.exists():
        return _indexed_files(folder, index)
    files = sorted(folder.glob("*.safetensors"))
    if files:
        return files
    pickled = sorted(path.name for path in folder.iterdir() if path.suffix in _PICKLED)
    if pickled:
        raise ModelError(
            f"{folder}: only {', '.join(pickled)}, no .safetensors. Pickled weights can run code "
            "and are not read; convert them to safetensors"
        )
    raise ModelError(f"{folder}: no .safetensors file")


def _indexed_files(folder: Path, index: Path) -> list[Path]:
    section = ConfigFile.read(index).section("weight_map")
    if section is None:
        raise ModelError(f"{index}: weight_map: is missing or empty")
    names = set()
    for tensor_name in section.names():
        name = section.get(tensor_name)
        if not isinstance(name, str) or Path(name).name != name:
            raise section.error(tensor_name, f"must be a file name, got {name!r}")
        if not (folder / name).is_file():
            raise section.error(tensor_name, f"names {name}, which is not in the folder")
        names.add(name)
    return [folder / name for name in sorted(names)]


def iterate_tensors(files: list[Path]) -> Iterator[tuple[str, torch.Tensor, Path]]:
    """Name, tensor on CPU and file of every tensor. One tensor is in memory at a time.

    Raises:
        ModelError: a file is no valid safetensors file.
    """
    for path in files:
        try:
            with safe_open(path, framework="pt", device="cpu") as file:
                for name in file.keys():
                    yield name, file.get_tensor(name), path
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path}: not readable as safetensors: {error}") from error
