"""What every request passes, as plain ASGI wrappers: id, log line, last-resort error, Host and
Origin, API key. Knows headers; knows no route but the open ones."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import logging
import re
import time
from collections.abc import Sequence
from http import HTTPStatus
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from duograph.server import errors
from duograph.server.errors import ApiError, new_request_id, quote
from duograph.server.metrics import FrontendMetrics

logger = logging.getLogger(__name__)

REQUEST_ID = "x-request-id"
HEALTH_PATHS = frozenset({"/health", "/health/live", "/ready", "/health/ready"})
ADMIN_PATHS = frozenset({"/flush_cache", "/start_profile", "/stop_profile"})
ADMIN_SCOPE = "duograph.admin"  # True in the scope of a request with an admin key
# The dashboard's files hold no data; it asks for a key to get some.
PAGE_PATHS = frozenset({"/", "/dashboard/dashboard.js", "/dashboard/dashboard.css"})
# polled by machines
_QUIET_PATHS = HEALTH_PATHS | PAGE_PATHS | {"/metrics", "/graphs"}
_OPEN_PATHS = HEALTH_PATHS | PAGE_PATHS
_SAFE_ID = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")


async def send_error(error: ApiError, send: Send) -> None:
    """The envelope as a whole ASGI response."""
    body = error.body()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(body)),
        *((name.encode(), value.encode()) for name, value in error.headers.items()),
    ]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})


class RequestLog:
    """Outermost: gives every response an x-request-id, counts and logs it, and turns an
    exception that nobody has handled into a 500."""

    def __init__(self, app: ASGIApp, metrics: FrontendMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _request_id(scope)
        status = 0
        begun = time.monotonic()

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[REQUEST_ID] = request_id
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception:
            logger.exception("request %s failed", request_id)
            if status == 0:
                await send_error(errors.internal(), send_with_id)
        finally:
            self._metrics.response(status)
            quiet = scope["path"] in _QUIET_PATHS and status != HTTPStatus.UNAUTHORIZED
            level = logging.DEBUG if quiet else logging.INFO
            logger.log(
                level,
                "%s %s %d %.3f s %s",
                scope["method"],
                quote(scope["path"])[1:-1],
                status,
                time.monotonic() - begun,
                request_id,
            )


class HostCheck:
    """Refuses a foreign Host (421: a web page that resolved its own name to this address) and
    a foreign Origin (403: a web page of another site)."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        bind_host: str,
        allowed_hosts: Sequence[str],
        allowed_origins: Sequence[str],
    ) -> None:
        self._app = app
        self._origins = frozenset(allowed_origins)
        # on a wildcard or public address the names are the operator's, unless they are listed
        self._any_host = "*" in allowed_hosts or not (allowed_hosts or _is_loopback(bind_host))
        local = ("localhost", "127.0.0.1", "::1")
        self._hosts = frozenset(name.lower() for name in (bind_host, *local, *allowed_hosts))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            host = headers.get("host", "")
            if not self._any_host and _host_name(host) not in self._hosts:
                hint = "; see --allowed-hosts"
                await send_error(ApiError(421, f"Host {quote(host)} is not served{hint}"), send)
                return
            origin = headers.get("origin")
            if origin is not None and not self._knows(origin, host):
                hint = "; see --allowed-origins"
                text = f"Origin {quote(origin)} is not allowed{hint}"
                await send_error(ApiError(403, text), send)
                return
        await self._app(scope, receive, send)

    def _knows(self, origin: str, host: str) -> bool:
        if "*" in self._origins or origin in self._origins:
            return True
        try:
            return urlsplit(origin).netloc.lower() == host.lower()
        except ValueError:  # such as http://[
            return False


class BearerAuth:
    """Who may call what: every route but the health ones and the dashboard's files needs one of the
    keys, if there are any; the admin routes need an admin key and are closed if there is none. An
    admin key opens everything. Routes that are partly for admins read ``ADMIN_SCOPE`` from the
    scope."""

    def __init__(self, app: ASGIApp, keys: Sequence[str], admin_keys: Sequence[str] = ()) -> None:
        self._app = app
        self._digests = [_digest(key.encode()) for key in keys]
        self._admin_digests = [_digest(key.encode()) for key in admin_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in _OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        given = _bearer_digest(scope)
        is_admin = _matches(given, self._admin_digests)
        is_known = _matches(given, self._digests)
        if scope["path"] in ADMIN_PATHS:
            refusal = None if is_admin else self._admin_refusal()
        else:
            refusal = None if is_admin or is_known or not self._digests else _wrong_key()
        if refusal is not None:
            await send_error(refusal, send)
            return
        scope[ADMIN_SCOPE] = is_admin
        await self._app(scope, receive, send)

    def _admin_refusal(self) -> ApiError:
        return _wrong_key() if self._admin_digests else errors.admin_closed()


def _wrong_key() -> ApiError:
    return ApiError(
        401,
        "Incorrect API key; send it as Authorization: Bearer KEY",
        code="invalid_api_key",
        headers={"www-authenticate": "Bearer"},
    )


def _bearer_digest(scope: Scope) -> bytes:
    """Of the key that the request carries; of none if it carries none."""
    scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
    return _digest(key.strip().encode("latin-1")) if scheme.lower() == "bearer" else b""


def _matches(digest: bytes, known: Sequence[bytes]) -> bool:
    # all are compared, so that the time does not tell which one was close
    matches = [hmac.compare_digest(digest, one) for one in known]
    return any(matches)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _request_id(scope: Scope) -> str:
    """The client's own, if it can stand in a header and a log line; else a new one."""
    given = Headers(scope=scope).get(REQUEST_ID, "")
    return given if _SAFE_ID.fullmatch(given) else new_request_id()


def _host_name(host: str) -> str:
    """Without the port, in lower case; the brackets of an IPv6 address go too."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower()


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
