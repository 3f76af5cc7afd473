"""The TCP sockets of the server. The supervisor binds them, so that a port in use is known before
a model is loaded; each frontend inherits one.

With several frontends each has a socket and a queue of its own on the same port (SO_REUSEPORT),
and the kernel spreads connections over them by address. From one queue that all share, the first
process to wake up takes whatever waits: of 16 connections at once, one of four got all.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Sequence
from typing import Any

BACKLOG = 2048


class PortInUse(Exception):
    """Another process listens there. One sentence for the user."""


class AddressError(Exception):
    """The address cannot be bound at all. One sentence for the user."""


def bind(host: str, port: int, count: int = 1) -> list[socket.socket]:
    """``count`` bound sockets that do not listen yet: until the frontends run, a connection is
    refused rather than left waiting. Port 0 is chosen by the system.

    Raises:
        PortInUse, AddressError
    """
    try:
        candidates = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except (socket.gaierror, UnicodeError) as error:
        raise AddressError(f"--host {host} is no address of this machine") from error
    family, _, _, _, address = candidates[0]
    if count == 1:
        return [_bound(family, address, host, shared=False)]
    # our own sockets would share the port with another server's, too: ask with one that does not
    _bound(family, address, host, shared=False).close()
    found: list[socket.socket] = []
    try:
        for _ in range(count):
            found.append(_bound(family, address, host, shared=True))
            address = found[0].getsockname()
    except BaseException:
        for listener in found:
            listener.close()
        raise
    return found


def listen(listeners: Sequence[socket.socket]) -> None:
    """Opens the port. Raises PortInUse if another process was faster."""
    first = listeners[0]
    host, port = first.getsockname()[:2]
    try:
        if len(listeners) > 1:
            with _bound(first.family, first.getsockname(), host, shared=False) as probe:
                probe.listen()
        for listener in listeners:
            listener.listen(BACKLOG)
    except OSError as error:
        raise _explained(error, host, port) from error


def _bound(
    family: socket.AddressFamily | int, address: Any, host: str, *, shared: bool
) -> socket.socket:
    """``shared``: with others that are, too. Raises PortInUse or AddressError."""
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        # a restart must not wait for the old connections to time out
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise _explained(error, host, address[1]) from error
    return listener


def url_of(listener: socket.socket, host: str | None = None) -> str:
    """``http://host:port``. Wildcard addresses become loopback unless ``host`` is given."""
    address, port = listener.getsockname()[:2]
    if host is None:
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(address, address)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _explained(error: OSError, host: str, port: int) -> Exception:
    if error.errno == errno.EADDRINUSE:
        return PortInUse(
            f"port {port} on {host} is in use; stop what listens there, choose another --port, "
            "or let --port 0 find a free one"
        )
    if error.errno == errno.EACCES:
        return AddressError(f"--port {port} needs more rights; ports from 1024 on do not")
    return AddressError(f"--host {host} --port {port} cannot be bound: {error.strerror}")
