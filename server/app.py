"""The HTTP routes. Thin: each one asks Serving or the engine client and writes JSON.

Knows paths and statuses; does not know tokens, text or processes.
"""

from __future__ import annotations

import time
from http import HTTPStatus
from typing import Any

import orjson
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import ASGIApp

from duograph.server import errors
from duograph.server.dashboard import add_dashboard
from duograph.server.direct import DirectRoutes
from duograph.server.docs import add_docs
from duograph.server.errors import ApiError, quote
from duograph.server.graph_report import graphs
from duograph.server.info import server_info
from duograph.server.metrics import CONTENT_TYPE, render_page
from duograph.server.middleware import REQUEST_ID, BearerAuth, HostCheck, RequestLog
from duograph.server.native_routes import add_native_routes
from duograph.server.openapi import describe
from duograph.server.responses import error_response, json_response
from duograph.server.serving import Serving


def create_app(serving: Serving) -> ASGIApp:
    """The whole application, wrapped in its middlewares; the outermost comes last."""
    api = FastAPI(title="duograph", docs_url=None, redoc_url=None, redirect_slashes=False)
    api.add_exception_handler(ApiError, _on_api_error)
    api.add_exception_handler(HTTPException, _on_http_exception)
    api.add_exception_handler(RequestValidationError, _on_validation_error)
    api.add_exception_handler(Exception, _on_unexpected)
    _add_openai_routes(api, serving)
    _add_health_routes(api, serving)
    _add_info_routes(api, serving)
    add_native_routes(api, serving)
    add_docs(api)
    add_dashboard(api)
    describe(api, serving)
    http = serving.config.http
    app: ASGIApp = DirectRoutes(
        api,
        {
            "/v1/chat/completions": serving.chat,
            "/v1/completions": serving.completion,
            "/generate": serving.generate,
        },
    )
    app = BearerAuth(app, serving.config.api_keys, serving.config.admin_keys)
    app = HostCheck(
        app,
        bind_host=http.host,
        allowed_hosts=http.allowed_hosts,
        allowed_origins=http.allowed_origins,
    )
    if http.allowed_origins:
        app = CORSMiddleware(
            app,
            allow_origins=http.allowed_origins,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),
            expose_headers=(REQUEST_ID,),
        )
    return RequestLog(app, serving.metrics)


def _add_openai_routes(api: FastAPI, serving: Serving) -> None:
    config = serving.config
    created = int(time.time())

    def card(name: str) -> dict[str, Any]:
        info = serving.engine.info
        return {
            "id": name,
            "object": "model",
            "created": created,
            "owned_by": "duograph",
            "root": config.served_names[0],
            "max_model_len": info.context_length if info else config.context_length,
        }

    @api.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        return await serving.chat(request)

    @api.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await serving.completion(request)

    @api.get("/v1/models")
    async def models() -> Response:
        return json_response(
            {"object": "list", "data": [card(name) for name in config.served_names]}
        )

    @api.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        if name not in config.served_names:
            raise errors.model_not_found(name)
        return json_response(card(name))


def _add_health_routes(api: FastAPI, serving: Serving) -> None:
    engine = serving.engine

    @api.get("/health/live")
    @api.head("/health/live", include_in_schema=False)
    async def live() -> Response:
        if not engine.alive:
            raise errors.engine_dead()
        return json_response({"status": "alive"})

    @api.get("/health")
    @api.head("/health", include_in_schema=False)
    async def health() -> Response:
        reason = serving.unavailable()
        if reason is not None:
            raise reason
        return json_response({"status": "ok"})

    @api.get("/ready")
    @api.head("/ready", include_in_schema=False)
    @api.get("/health/ready")
    @api.head("/health/ready", include_in_schema=False)
    async def ready() -> Response:
        reason = serving.unavailable()
        status = engine.status
        body = {
            "ready": reason is None,
            "phase": "draining" if serving.draining else status.phase,
            "progress": serving.progress(),
            "done": status.done,
            "total": status.total,
        }
        if reason is None:
            return json_response(body)
        # an error like any other, and the progress beside it
        body |= orjson.loads(reason.body())
        return json_response(body, status=reason.status, headers=reason.headers)


def _add_info_routes(api: FastAPI, serving: Serving) -> None:
    engine = serving.engine

    @api.get("/metrics")
    async def metrics() -> Response:
        page = render_page(
            engine.snapshot,
            serving.metrics,
            frontend_index=serving.config.index,
            dropped_frames=engine.dropped_frames,
        )
        return Response(page, headers={"content-type": CONTENT_TYPE})

    @api.get("/server_info")
    @api.get("/get_server_info")
    async def describe_server() -> Response:
        return json_response(server_info(serving))

    @api.get("/graphs")
    def describe_graphs() -> Response:  # in a thread: its milliseconds are not the streams'
        return json_response(graphs(serving))


async def _on_api_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(error)


async def _on_http_exception(request: Request, error: Exception) -> Response:
    """Starlette's own: no such route, method not allowed."""
    assert isinstance(error, HTTPException)
    headers = error.headers
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        headers = {"allow": ", ".join(_methods(request))}
    phrase = HTTPStatus(error.status_code).phrase
    text = f"{phrase}: {request.method} {quote(request.url.path)[1:-1]}"
    return error_response(ApiError(error.status_code, text, headers=headers))


def _methods(request: Request) -> list[str]:
    """What the path takes: a path's methods may be routes of their own, each of which only knows
    its own."""
    found: set[str] = set()
    for route in request.app.routes:
        if isinstance(route, Route) and route.matches(request.scope)[0] is not Match.NONE:
            found |= route.methods or set()
    return sorted(found)


async def _on_unexpected(_: Request, error: Exception) -> Response:
    """It is raised again afterwards, to be logged by RequestLog."""
    return error_response(errors.internal())


async def _on_validation_error(_: Request, error: Exception) -> Response:
    return error_response(ApiError(400, "The request's parameters are not valid"))
