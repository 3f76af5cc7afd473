"""The HTTP routes. Thin: each one asks Serving or the engine client and writes JSON.

Knows paths and statuses; does not know tokens, text or processes.
"""

from __future__ import annotations

import time
from http import HTTPStatus
from typing import Any, Literal

import orjson
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp

from duograph.server import errors
from duograph.server.errors import ApiError, quote
from duograph.server.metrics import CONTENT_TYPE, render_page
from duograph.server.middleware import REQUEST_ID, BearerAuth, HostCheck, RequestLog
from duograph.server.openai_schema import ChatRequest, CompletionRequest
from duograph.server.serving import Serving


def create_app(serving: Serving) -> ASGIApp:
    """The whole application, wrapped in its middlewares; the outermost comes last."""
    api = FastAPI(title="duograph", docs_url=None, redoc_url=None, redirect_slashes=False)
    api.add_exception_handler(ApiError, _on_api_error)
    api.add_exception_handler(HTTPException, _on_http_exception)
    api.add_exception_handler(RequestValidationError, _on_validation_error)
    _add_openai_routes(api, serving)
    _add_health_routes(api, serving)
    _add_info_routes(api, serving)
    _describe_bodies(api)
    http = serving.config.http
    app: ASGIApp = BearerAuth(api, serving.config.api_keys)
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

    @api.post("/v1/chat/completions", openapi_extra=_body_schema(ChatRequest))
    async def chat_completions(request: Request) -> Response:
        return await serving.chat(request)

    @api.post("/v1/completions", openapi_extra=_body_schema(CompletionRequest))
    async def completions(request: Request) -> Response:
        return await serving.completion(request)

    @api.get("/v1/models")
    async def models() -> Response:
        return _json({"object": "list", "data": [card(name) for name in config.served_names]})

    @api.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        if name not in config.served_names:
            raise errors.model_not_found(name)
        return _json(card(name))


def _add_health_routes(api: FastAPI, serving: Serving) -> None:
    engine = serving.engine

    @api.get("/health/live")
    @api.head("/health/live", include_in_schema=False)
    async def live() -> Response:
        if not engine.alive:
            raise errors.engine_dead()
        return _json({"status": "alive"})

    @api.get("/health")
    @api.head("/health", include_in_schema=False)
    async def health() -> Response:
        reason = serving.unavailable()
        if reason is not None:
            raise reason
        return _json({"status": "ok"})

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
            return _json(body)
        # an error like any other, and the progress beside it
        body |= orjson.loads(reason.body())
        return _json(body, status=reason.status, headers=reason.headers)


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
    async def server_info() -> Response:
        return _json(_server_info(serving))

    @api.get("/graphs")
    async def graphs() -> Response:
        return _json(_graphs(serving))


def _server_info(serving: Serving) -> dict[str, Any]:
    """Flags at the top level, as SGLang has them; the engine's own words in internal_states."""
    engine = serving.engine
    info = engine.info
    state: dict[str, Any] = {
        "phase": engine.status.phase,
        "running": engine.heartbeat.running,
        "waiting": engine.heartbeat.waiting,
        "finished_steps": engine.heartbeat.steps,
    }
    limits: dict[str, Any] = {}
    if info is not None:
        state |= info.details
        limits = {
            "max_total_num_tokens": info.max_total_num_tokens,
            "max_running_requests": info.max_running_requests,
            "context_length": info.context_length,
            "vocab_size": info.vocab_size,
        }
    return {
        **serving.config.server_info,
        **limits,
        "served_model_name": list(serving.config.served_names),
        "status": "draining" if serving.draining else engine.status.phase,
        "internal_states": [state],
    }


def _graphs(serving: Serving) -> dict[str, Any]:
    """What was captured at start-up, and what has been replayed since."""
    info, snapshot = serving.engine.info, serving.engine.snapshot
    counted: dict[str, float] = {}
    if snapshot is not None:
        for kinds in (snapshot.counters, snapshot.gauges):
            counted |= {k: v for k, v in kinds.items() if k.startswith("duograph_graph")}
    return {
        "captured": info.details.get("graphs", {}) if info is not None else {},
        "counters": counted,
    }


def _json(body: Any, *, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(orjson.dumps(body), status, headers=headers, media_type="application/json")


def _body_schema(model: type[BaseModel]) -> dict[str, Any]:
    """The body for /openapi.json: routes read it themselves, to count it while it arrives."""
    schema = {"$ref": f"#/components/schemas/{model.__name__}"}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def _describe_bodies(api: FastAPI) -> None:
    """Puts the schemas that _body_schema points to into /openapi.json."""
    generate = api.openapi
    models: list[tuple[type[BaseModel], Literal["validation"]]] = [
        (ChatRequest, "validation"),
        (CompletionRequest, "validation"),
    ]

    def openapi() -> dict[str, Any]:
        document = generate()
        template = "#/components/schemas/{model}"
        _, definitions = models_json_schema(models, ref_template=template)
        schemas = document.setdefault("components", {}).setdefault("schemas", {})
        schemas.update(definitions["$defs"])
        return document

    api.openapi = openapi  # type: ignore[method-assign]


def _error_response(error: ApiError) -> Response:
    return Response(
        error.body(), error.status, headers=error.headers, media_type="application/json"
    )


async def _on_api_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return _error_response(error)


async def _on_http_exception(request: Request, error: Exception) -> Response:
    """Starlette's own: no such route, method not allowed."""
    assert isinstance(error, HTTPException)
    phrase = HTTPStatus(error.status_code).phrase
    text = f"{phrase}: {request.method} {quote(request.url.path)[1:-1]}"
    return _error_response(ApiError(error.status_code, text, headers=error.headers))


async def _on_validation_error(_: Request, error: Exception) -> Response:
    return _error_response(ApiError(400, "The request's parameters are not valid"))
