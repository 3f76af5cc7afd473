"""The sockets of the engine process: requests come in, tokens and status go out.

Nothing here blocks and no message is lost or reordered: what a full pipe does not take waits.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import msgspec
import zmq

from duograph.scheduler.channel import (
    Receiver,
    Sender,
    frontend_address,
    scheduler_address,
    supervisor_address,
)
from duograph.scheduler.messages import RID_FRONTEND_SHIFT, ToScheduler

# Messages kept for a frontend whose pipe is full, on top of the pipe's own 10,000. A frontend
# that is this far behind is stuck, and its requests hold pages that others need.
MAX_BACKLOG = 1_000


class FrontendStuck(RuntimeError):
    """A frontend has not read its messages for too long."""


class Wires:
    def __init__(self, run_dir: str, num_frontends: int) -> None:
        self._context: zmq.Context[Any] = zmq.Context()
        self.requests: Receiver[Any] = Receiver(
            self._context, scheduler_address(run_dir), ToScheduler
        )
        self._frontends = [
            Sender(self._context, frontend_address(run_dir, index))
            for index in range(num_frontends)
        ]
        self._backlogs: list[deque[msgspec.Struct]] = [deque() for _ in range(num_frontends)]
        self._supervisor = Sender(self._context, supervisor_address(run_dir))

    def to_frontend(self, index: int, message: msgspec.Struct) -> None:
        """Raises FrontendStuck if the frontend has stopped reading."""
        backlog, sender = self._backlogs[index], self._frontends[index]
        backlog.append(message)
        while backlog and sender.send(backlog[0]):
            backlog.popleft()
        if len(backlog) > MAX_BACKLOG:
            raise FrontendStuck(f"frontend {index} reads no messages: {len(backlog)} wait")

    def to_frontend_of(self, id: int, message: msgspec.Struct) -> None:
        """To the one that made ``id``; nowhere if there is none of that number."""
        index = id >> RID_FRONTEND_SHIFT
        if 0 <= index < len(self._frontends):
            self.to_frontend(index, message)

    def to_frontends(self, message: msgspec.Struct) -> None:
        for index in range(len(self._frontends)):
            self.to_frontend(index, message)

    def to_supervisor(self, message: msgspec.Struct) -> None:
        self._supervisor.send(message)

    def close(self, linger_ms: int) -> None:
        """``linger_ms`` is how long last words may take to leave."""
        self.requests.close()
        for sender in (*self._frontends, self._supervisor):
            sender.close(linger_ms)
        self._context.term()
