"""One folder for all code that is compiled on this machine: Inductor, Triton, FlashInfer.

The libraries are told by their own variables, which the engine process is started with; a
variable that the user has set wins. The folder lies in our cache folder, so it outlives the
server and a second start compiles nothing. What is in it is code that will be run: it must be
the user's own (``model_cache.cache_root`` sees to that). This file knows no format of a cache.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from duograph.server.model_cache import ModelError, cache_root

_log = logging.getLogger(__name__)

FOLDER = "artifacts"


def artifact_environment(cache_dir: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that keep compiled code in ``cache_dir``.

    Args:
        cache_dir: made by whoever writes to it first.
        environ: of the user; a variable that is set there is not in the result. TRITON_HOME
            moves Triton's cache too, so it stands for TRITON_CACHE_DIR.
    """
    chosen = {
        "TORCHINDUCTOR_CACHE_DIR": cache_dir / "inductor",
        "TRITON_CACHE_DIR": cache_dir / "triton",
        "FLASHINFER_WORKSPACE_BASE": cache_dir / "flashinfer",
    }
    kept = {name for name in chosen if environ.get(name)}
    if environ.get("TRITON_HOME"):
        kept.add("TRITON_CACHE_DIR")
    return {name: str(path) for name, path in chosen.items() if name not in kept}


def engine_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """``environ`` with the compilers' caches in the user's cache folder. Where there is no folder
    that is safe to keep code in, a warning says so and the libraries' own places remain."""
    try:
        folder = cache_root(environ) / FOLDER
        folder.mkdir(mode=0o700, exist_ok=True)
    except (ModelError, OSError) as error:
        _log.warning("compiled code is kept where each compiler puts it: %s", error)
        return dict(environ)
    return {**environ, **artifact_environment(folder, environ)}
