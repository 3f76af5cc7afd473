"""What a frontend tells the supervisor about itself."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable

import httpx
import pytest
import zmq

from duograph.scheduler.channel import Receiver, supervisor_address
from duograph.scheduler.messages import FrontendBeat, ToSupervisor
from duograph.server.config import HttpConfig
from duograph.tests.server.conftest import RunningServer, wait_until

pytestmark = pytest.mark.slow


def test_a_frontend_that_is_told_to_end_says_so_while_it_still_serves(
    new_server: Callable[..., RunningServer],
) -> None:
    server = new_server(http=HttpConfig(shutdown_timeout=20.0))
    beats: list[FrontendBeat] = []
    address = supervisor_address(str(server.log.parent))
    with zmq.Context() as context:
        receiver: Receiver[ToSupervisor] = Receiver(context, address, ToSupervisor)

        def beat() -> FrontendBeat | None:
            receiver.wait(0.05)
            beats.extend(m for m in receiver.drain() if isinstance(m, FrontendBeat))
            return beats[-1] if beats else None

        try:
            wait_until(lambda: beat() is not None, 10, "a first beat")
            assert beats == [FrontendBeat(0, draining=False)] * len(beats)
            request = threading.Thread(target=_ask_without_answer, args=(server,), daemon=True)
            request.start()
            wait_until(lambda: bool(server.received("GenerateRequest")), 10, "a running request")
            begun = time.monotonic()
            server.frontend.send_signal(signal.SIGTERM)
            wait_until(lambda: beat() == FrontendBeat(0, draining=True), 10, "the news")
            assert server.frontend.poll() is None, "it waits for its request"
            assert time.monotonic() - begun < 10
        finally:
            receiver.close()


def _ask_without_answer(server: RunningServer) -> None:
    body = {"prompt": [5, 6, 7], "cache_salt": "hang", "max_tokens": 3}
    try:
        httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
    except httpx.HTTPError:
        return  # the test kills the server
