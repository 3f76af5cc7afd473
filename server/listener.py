"""The one TCP socket of the server. The supervisor binds it, so that a port in use is known
before a model is loaded; the frontends inherit it and share its queue."""

from __future__ import annotations

import errno
import socket

BACKLOG = 2048


class PortInUse(Exception):
    """Another process listens there. One sentence for the user."""


class AddressError(Exception):
    """The address cannot be bound at all. One sentence for the user."""


def bind(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet: until the frontends run, a connection is
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
    family, kind, protocol, _, address = candidates[0]
    listener = socket.socket(family, kind, protocol)
    try:
        # a restart must not wait for the old connections to time out
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise _explained(error, host, port) from error
    return listener


def listen(listener: socket.socket) -> None:
    """Opens the port. Raises PortInUse if another process was faster."""
    try:
        listener.listen(BACKLOG)
    except OSError as error:
        host, port = listener.getsockname()[:2]
        raise _explained(error, host, port) from error


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
