"""From the model argument to a local folder with config.json, safetensors and tokenizer.json.

An empty argument is the default model (default_model.py), a .gguf file is converted once and
cached (model_cache.py), ``org/name`` is fetched from the hub only if no such path exists. It
does not know what is in a config.json; the engine reads that.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from duograph.server import default_model
from duograph.server.model_cache import (
    CONVERSION_VERSION,
    ModelError,
    Say,
    build_once,
    cache_root,
    convert_gguf,
)

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
HUB_FILES = ("*.safetensors", "*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt")


@dataclass(frozen=True)
class LocalModel:
    folder: Path
    name: str  # what the API calls it unless --served-model-name says otherwise


def resolve_model(
    model_path: str, load_format: str, environ: Mapping[str, str], say: Say
) -> LocalModel:
    """Finds, fetches or converts the model. ``say`` gets one line for each slow step.

    Raises:
        ModelError: with one sentence that says what is wrong with ``--model-path``.
    """
    if not model_path:
        return LocalModel(default_model.fetch(cache_root(environ), say), default_model.NAME)
    path = Path(model_path).expanduser()
    if path.is_dir():
        _check_folder(path, load_format)
        return LocalModel(path.resolve(), path.resolve().name)
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise ModelError(f"--model-path {model_path} is a file, and not a .gguf file")
        if load_format == "safetensors":
            raise ModelError(f"--load-format safetensors cannot read the GGUF file {model_path}")
        return LocalModel(_converted_file(path.resolve(), cache_root(environ), say), path.stem)
    if HUB_ID.fullmatch(model_path):
        return LocalModel(_from_hub(model_path, say), model_path)
    raise ModelError(f"--model-path {model_path}: there is no such file or folder")


def _check_folder(folder: Path, load_format: str) -> None:
    names = sorted(entry.name for entry in folder.iterdir())
    gguf = [name for name in names if name.lower().endswith(".gguf")]
    if "config.json" not in names:
        hint = f"; give the file itself: {folder / gguf[0]}" if gguf else ""
        raise ModelError(f"--model-path {folder} has no config.json{hint}")
    if load_format == "gguf":
        raise ModelError(f"--load-format gguf needs a .gguf file and {folder} is a folder")
    if load_format != "dummy" and not any(name.endswith(".safetensors") for name in names):
        others = [name for name in names if name.endswith((".bin", ".pt", ".pth"))]
        hint = f"; {others[0]} is not read, because such a file can run code" if others else ""
        raise ModelError(f"--model-path {folder} has no .safetensors file{hint}")


def _converted_file(source: Path, root: Path, say: Say) -> Path:
    status = source.stat()
    identity = f"{source}\0{status.st_size}\0{status.st_mtime_ns}"
    digest = hashlib.sha256(identity.encode()).hexdigest()[:20]
    target = root / "models" / f"{source.stem[:80]}-{digest}-v{CONVERSION_VERSION}"

    def build(folder: Path) -> None:
        say(f"Converting {source.name} to safetensors, once")
        convert_gguf(source, folder)

    return build_once(target, build, say)


def _from_hub(repo_id: str, say: Say) -> Path:
    import huggingface_hub
    from huggingface_hub import errors

    say(f"Looking for {repo_id} on the model hub")
    try:
        folder = Path(huggingface_hub.snapshot_download(repo_id, allow_patterns=list(HUB_FILES)))
    except errors.GatedRepoError as error:
        raise ModelError(f"--model-path {repo_id}: the hub asks for an access token") from error
    except errors.RepositoryNotFoundError as error:
        raise ModelError(
            f"--model-path {repo_id}: there is no such folder and no such model on the hub"
        ) from error
    except (errors.LocalEntryNotFoundError, errors.HfHubHTTPError, OSError) as error:
        raise ModelError(
            f"--model-path {repo_id}: there is no such folder, the hub cannot be reached and "
            "nothing of this model is in the hub's cache"
        ) from error
    _check_folder(folder, "auto")
    return folder
