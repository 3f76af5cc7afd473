"""One HTTP process from its parts to its end: uvicorn on the inherited socket, and the drain.

Knows how the parts fit together; does not know how the process was started or what it imports
first (frontend.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import uvicorn
import uvloop
import zmq

from duograph.runners.model_config import GenerationDefaults
from duograph.scheduler.channel import (
    Sender,
    frontend_address,
    scheduler_address,
    supervisor_address,
)
from duograph.scheduler.messages import FrontendBeat
from duograph.server import errors
from duograph.server.app import create_app
from duograph.server.chat import ChatTemplate
from duograph.server.chat_features import ParserFlags
from duograph.server.config import FrontendConfig
from duograph.server.engine_client import EngineClient
from duograph.server.errors import ApiError
from duograph.server.metrics import FrontendMetrics
from duograph.server.protocol import LimitedHttpProtocol
from duograph.server.serving import Serving
from duograph.server.tokenizer import Tokenizer
from duograph.server.translate import SamplingDefaults, Translator

KEEP_ALIVE_S = 30
BACKLOG = 2048
BEAT_S = 1.0
CLOSE_TIMEOUT_S = 2  # for connections, once no generation runs any more


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: SIGTERM must not close streams."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def run(config: FrontendConfig, listener: socket.socket) -> None:
    """Serves until SIGTERM and the end of the drain.

    Raises:
        ModelError, TokenizerError, ValueError: a file of the model folder is missing or broken.
    """
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(config, listener))


def create_serving(config: FrontendConfig) -> Serving:
    """All parts but the server. Raises ModelError, TokenizerError, ValueError or zmq.ZMQError."""
    folder = Path(config.model_folder)
    tokenizer = Tokenizer(folder)
    template = ChatTemplate(folder, tokenizer)
    defaults = SamplingDefaults.of_model(GenerationDefaults.from_folder(folder))
    engine = EngineClient(
        scheduler_address=scheduler_address(config.run_dir),
        own_address=frontend_address(config.run_dir, config.index),
        frontend_index=config.index,
        heartbeat_timeout_s=config.engine_silence_s,
    )
    http = config.http
    parsers = ParserFlags.named(http.tool_call_parser, http.reasoning_parser)
    translator = Translator(tokenizer, template, defaults, http.max_n, parsers)
    return Serving(config, tokenizer, translator, engine, FrontendMetrics())


async def _beat(config: FrontendConfig, serving: Serving) -> None:
    """Tells the supervisor that this event loop turns, until it is cancelled."""
    with zmq.Context() as context:
        sender = Sender(context, supervisor_address(config.run_dir))
        try:
            while True:
                # a full pipe holds beats enough
                sender.send(FrontendBeat(config.index, serving.draining))
                await asyncio.sleep(BEAT_S)
        finally:
            sender.close()


async def _serve(config: FrontendConfig, listener: socket.socket) -> None:
    serving = create_serving(config)
    server = _Server(
        uvicorn.Config(
            create_app(serving),
            http=LimitedHttpProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            backlog=BACKLOG,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=CLOSE_TIMEOUT_S,
        )
    )
    drains: list[asyncio.Task[None]] = []

    async def drain(timeout_s: float, error: ApiError) -> None:
        await serving.drain(timeout_s, error)
        server.should_exit = True

    def on_sigterm() -> None:
        if not drains:
            work = drain(config.http.shutdown_timeout, errors.draining())
            drains.append(asyncio.create_task(work))

    def on_sigquit() -> None:
        # another process of the tree has died: nothing that runs can be finished
        drains.append(asyncio.create_task(drain(0.0, errors.engine_dead())))

    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, on_sigterm)
    loop.add_signal_handler(signal.SIGQUIT, on_sigquit)
    serving.engine.start()
    serving.tokenizer.prepare_masking()
    # what start-up has made stays for ever: the collector need not look at it again
    gc.collect()
    gc.freeze()
    beats = asyncio.create_task(_beat(config, serving))
    try:
        await server.serve(sockets=[listener])
    finally:
        beats.cancel()
        serving.engine.close()
        serving.tokenizer.close()
