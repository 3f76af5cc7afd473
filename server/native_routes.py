"""The routes beside OpenAI's: SGLang's native ones, the tokenizer's, and the operator's.

Thin, as app.py. Who may call the admin routes is the middleware's business, but for
``abort_all``, which is one field of an open route.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import FastAPI, Request
from pydantic import Field, StrictBool
from starlette.responses import Response

from duograph.runners.config import MAX_PROFILED_STEPS
from duograph.scheduler.messages import Command
from duograph.server import errors
from duograph.server.body import parse_object
from duograph.server.errors import ApiError, bad_field, not_supported
from duograph.server.info import model_info
from duograph.server.middleware import ADMIN_SCOPE
from duograph.server.openai_schema import Strict, validate
from duograph.server.responses import json_response
from duograph.server.serving import Serving
from duograph.server.tokenize import detokenize, parse_detokenize, parse_tokenize, tokenize


class AbortBody(Strict):
    """Body of POST /abort_request."""

    rid: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    abort_all: StrictBool = False


class ProfileBody(Strict):
    """Body of POST /start_profile, which may be left out."""

    num_steps: Annotated[int, Field(ge=1, le=MAX_PROFILED_STEPS)] | None = None


def parse_profile(body: bytes) -> ProfileBody:
    """Raises ApiError 400 naming the field."""
    document = parse_object(body)
    if "output_dir" in document:  # a client chooses no file of this machine
        raise not_supported("output_dir", "--profile-dir says where profiles go")
    return validate(ProfileBody, document)


def add_native_routes(api: FastAPI, serving: Serving) -> None:
    _add_generation(api, serving)
    _add_tokenizer(api, serving)
    _add_operator(api, serving)

    @api.get("/model_info")
    @api.get("/get_model_info")
    async def describe_model() -> Response:
        return json_response(model_info(serving))


def _add_generation(api: FastAPI, serving: Serving) -> None:
    @api.post("/generate")
    @api.put("/generate")
    async def generate(request: Request) -> Response:
        return await serving.generate(request)

    @api.post("/invocations")
    async def invocations(request: Request) -> Response:
        return await serving.invocation(request)

    @api.get("/health_generate")
    async def health_generate() -> Response:
        await serving.generate_one_token()
        return json_response({"status": "ok"})

    @api.get("/ping")
    async def ping() -> Response:
        reason = serving.unavailable()
        if reason is not None:
            raise reason
        return json_response({"status": "ok"})


def _add_tokenizer(api: FastAPI, serving: Serving) -> None:
    @api.post("/tokenize")
    @api.post("/v1/tokenize")
    async def to_tokens(request: Request) -> Response:
        serving.check_ready()
        body = parse_tokenize(await serving.body(request))
        serving.check_model(body.model)
        return json_response(await tokenize(body, serving.translator, serving.info))

    @api.post("/detokenize")
    @api.post("/v1/detokenize")
    async def to_text(request: Request) -> Response:
        serving.check_ready()
        body = parse_detokenize(await serving.body(request))
        serving.check_model(body.model)
        return json_response(await detokenize(body, serving.tokenizer, serving.info))


def _add_operator(api: FastAPI, serving: Serving) -> None:
    @api.post("/abort_request")
    async def abort_request(request: Request) -> Response:
        serving.check_ready()
        body = validate(AbortBody, parse_object(await serving.body(request)))
        if body.abort_all:
            if not request.scope[ADMIN_SCOPE]:
                raise errors.admin_closed()
            answer = await serving.engine.control("abort_all")
        elif body.rid is None:
            raise bad_field("rid", "this field is required")
        else:
            answer = await serving.engine.control("abort_named", body.rid)
        return json_response({"aborted": int(answer.text)})

    async def order(command: Command, argument: str = "") -> Response:
        serving.check_ready()
        answer = await serving.engine.control(command, argument)
        if not answer.ok:
            raise ApiError(409, f"{command}: {answer.text}", code="refused")
        return json_response({"message": answer.text})

    @api.get("/flush_cache")
    @api.post("/flush_cache")
    async def flush_cache() -> Response:
        return await order("flush_cache")

    @api.get("/start_profile")
    @api.post("/start_profile")
    async def start_profile(request: Request) -> Response:
        body = ProfileBody()
        length = request.headers.get("content-length", "0")
        if length != "0" or "transfer-encoding" in request.headers:
            body = parse_profile(await serving.body(request))
        return await order("start_profile", str(body.num_steps or ""))

    @api.get("/stop_profile")
    @api.post("/stop_profile")
    async def stop_profile() -> Response:
        return await order("stop_profile")
