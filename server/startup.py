"""What the user sees while the server starts, and the first request, which the server sends
to itself through the same door as everybody else."""

from __future__ import annotations

import http.client
import json
import logging
import sys
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from tqdm import tqdm

from duograph.scheduler.messages import EngineStatus

_log = logging.getLogger(__name__)

PHASE_TITLES = {
    "starting": "Starting the engine",
    "loading_weights": "Loading weights",
    "planning_memory": "Planning memory",
    "building_kernels": "Building FlashInfer kernels",
    "compiling": "Compiling the prefill pieces",
    "capturing_decode": "Capturing decode graphs",
    "capturing_prefill": "Capturing prefill graphs",
    "warming_up": "Warming up",
    "ready": "Engine ready",
    "draining": "Draining",
}
# Where progress is counted, the words that scripts look for; only safetensors files report any.
PROGRESS_TITLES = {"loading_weights": "Loading safetensors checkpoint shards, tensors"}
# The engine draws these itself: it knows the sizes and the free memory.
SHOWN_BY_ENGINE = ("capturing_decode", "capturing_prefill")
LINES_PER_PHASE = 4  # without a terminal: carriage returns ruin container logs
WARM_UP_TIMEOUT_S = 120.0


class StartupReport:
    """Progress bars on a terminal, a few plain lines otherwise."""

    def __init__(self, *, bars: bool) -> None:
        self._bars = bars
        self._bar: tqdm[Any] | None = None
        self._phase = ""
        self._shown = 0  # progress of the last plain line

    def show(self, status: EngineStatus) -> None:
        title = PHASE_TITLES[status.phase]
        if status.phase != self._phase:
            self.close()
            self._phase, self._shown = status.phase, 0
            if status.phase not in SHOWN_BY_ENGINE and status.total <= 1:
                _log.info("%s", title)
        if status.phase in SHOWN_BY_ENGINE or status.total <= 1:
            return
        title = PROGRESS_TITLES.get(status.phase, title)
        if self._bars:
            if self._bar is None:
                self._bar = tqdm[Any](total=status.total, desc=title, file=sys.stderr)
            self._bar.update(status.done - self._bar.n)
        elif self._is_due(status):
            self._shown = status.done
            _log.info("%s: %d/%d", title, status.done, status.total)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _is_due(self, status: EngineStatus) -> bool:
        if status.done <= self._shown:
            return False
        step = max(1, status.total // LINES_PER_PHASE)
        return status.done - self._shown >= step or status.done == status.total


def warm_up(
    url: str,
    model: str,
    api_key: str | None,
    *,
    clock: Callable[[], float] = time.monotonic,
    timeout_s: float = WARM_UP_TIMEOUT_S,
) -> str | None:
    """Generates two tokens through HTTP. None if it worked, else the reason in words.

    Connections that are refused and 503 are retried: the engine says ready to all processes
    at the same time, and this one may hear it first.
    """
    deadline = clock() + timeout_s
    body = {"model": model, "prompt": "Hello", "max_tokens": 2, "temperature": 0}
    while True:
        try:
            status, answer = _post(url, json.dumps(body), api_key, deadline - clock())
            if status == 200:
                return None
            problem = f"it was answered {status}: {answer}"
            if status != 503:
                return problem
        except OSError as error:
            problem = str(error)
        except http.client.HTTPException as error:
            return f"the answer is not HTTP: {error!r}"
        if clock() >= deadline:
            return problem
        time.sleep(0.05)


def _post(url: str, body: str, api_key: str | None, timeout_s: float) -> tuple[int, str]:
    address = urlsplit(url)
    headers = {"Content-Type": "application/json"}
    if api_key is not None:
        headers["Authorization"] = f"Bearer {api_key}"
    connection = http.client.HTTPConnection(
        address.hostname or "", address.port, timeout=max(timeout_s, 0.1)
    )
    try:
        connection.request("POST", "/v1/completions", body, headers)
        response = connection.getresponse()
        return response.status, response.read().decode(errors="replace")[:500]
    finally:
        connection.close()
