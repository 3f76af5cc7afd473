"""The generating routes without the framework's layers around them.

FastAPI's own way to an endpoint (telemetry, body limits, exit stacks, a walk over all routes,
dependencies) and back was a quarter of the time until a request of 512 token ids had left for the
engine. These endpoints need none of it: they take the request and read the body themselves. Their
routes stay in the application, which describes them and answers other methods. Knows paths and
ApiError; whatever else is raised is RequestLog's.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from duograph.server.errors import ApiError
from duograph.server.responses import error_response

Endpoint = Callable[[Request], Awaitable[Response]]


class DirectRoutes:
    """Wraps the application whose POST routes ``endpoints`` are, by path."""

    def __init__(self, app: ASGIApp, endpoints: Mapping[str, Endpoint]) -> None:
        self._app = app
        self._endpoints = endpoints

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_post = scope["type"] == "http" and scope["method"] == "POST"
        endpoint = self._endpoints.get(scope["path"]) if is_post else None
        if endpoint is None:
            await self._app(scope, receive, send)
            return
        try:
            response = await endpoint(Request(scope, receive, send))
        except ApiError as error:
            response = error_response(error)
        await response(scope, receive, send)
