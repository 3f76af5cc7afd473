"""The main function of one HTTP process: ``python -m duograph.server.frontend --config-fd N``.

Reads its FrontendConfig from the inherited descriptor and arranges for the death with its parent
and for early signals; everything else is http_server.py, which takes a second or two to import,
so that happens after the signals are in order. Imports no torch.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import socket
import sys
from types import FrameType

import msgspec
import setproctitle

from duograph.scheduler.exit_codes import ExitCode
from duograph.scheduler.logs import configure_logging
from duograph.server.child import die_with_parent
from duograph.server.config import FrontendConfig

logger = logging.getLogger(__name__)


def main() -> int:
    # told to end while nobody can be served yet: there is nothing to drain
    signal.signal(signal.SIGTERM, _leave)
    # a terminal sends it to the whole group; the supervisor decides
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent()
    parser = argparse.ArgumentParser(prog="duograph.server.frontend")
    parser.add_argument("--config-fd", type=int, required=True, help="descriptor to read from")
    config = read_config(parser.parse_args().config_fd)
    if os.getppid() != config.parent_pid:
        return int(ExitCode.INTERNAL)  # the parent died before it could be watched
    name = f"frontend {config.index}"
    configure_logging(config.http.log_level, config.http.log_format, name)
    setproctitle.setproctitle(f"duograph: {name}")
    listener = socket.socket(fileno=config.listen_fd)
    from duograph.server import http_server
    from duograph.server.tokenizer import TokenizerError

    try:
        http_server.run(config, listener)
    except (TokenizerError, ValueError) as error:
        logger.error("%s", error)
        return int(ExitCode.MODEL)
    return int(ExitCode.OK)


def read_config(fd: int) -> FrontendConfig:
    """Raises msgspec.ValidationError."""
    with os.fdopen(fd, "rb") as pipe:
        return msgspec.json.decode(pipe.read(), type=FrontendConfig)


def _leave(_number: int, _frame: FrameType | None) -> None:
    sys.exit(int(ExitCode.OK))


if __name__ == "__main__":
    sys.exit(main())
