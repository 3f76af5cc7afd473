"""/openapi.json: what the routes accept and answer, beyond what FastAPI can see of routes that
read their own bodies. Knows paths and schemas; changes nothing at run time."""

from __future__ import annotations

from fastapi import FastAPI
from pydantic import BaseModel

from duograph.server.native_routes import AbortBody
from duograph.server.native_schema import GenerateBody
from duograph.server.openai_schema import ChatRequest, CompletionRequest
from duograph.server.openapi_bodies import REF, TOKENIZE_CHAT, Schema, body_schemas
from duograph.server.openapi_examples import EXAMPLES
from duograph.server.serving import Serving
from duograph.server.tokenize import DetokenizeBody, TokenizeBody

# By path: the bodies that it takes.
_BODIES: dict[str, tuple[type[BaseModel], ...]] = {
    "/v1/chat/completions": (ChatRequest,),
    "/v1/completions": (CompletionRequest,),
    "/generate": (GenerateBody,),
    "/invocations": (ChatRequest, CompletionRequest, GenerateBody),
    "/tokenize": (TokenizeBody, ChatRequest),
    "/v1/tokenize": (TokenizeBody, ChatRequest),
    "/detokenize": (DetokenizeBody,),
    "/v1/detokenize": (DetokenizeBody,),
    "/abort_request": (AbortBody,),
}
_STREAMED = ("/v1/chat/completions", "/v1/completions", "/generate", "/invocations")
_ADMIN = ("/flush_cache", "/start_profile", "/stop_profile")
_OPEN = ("/health", "/health/live", "/ready", "/health/ready")

_TEXT: Schema = {"type": "string"}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_ERROR: Schema = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": _TEXT,
                "type": {"enum": ["invalid_request_error", "rate_limit_error", "server_error"]},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_MODEL: Schema = {
    "type": "object",
    "required": ["id", "object", "created", "owned_by", "max_model_len"],
    "properties": {
        "id": _TEXT,
        "object": {"const": "model"},
        "created": _COUNT,
        "owned_by": _TEXT,
        "root": _TEXT,
        "max_model_len": {"type": ["integer", "null"]},
    },
}


def _answer(kind: str, choice: Schema) -> Schema:
    shared = {"index": _COUNT, "finish_reason": {"enum": ["stop", "length", "tool_calls"]}}
    return {
        "type": "object",
        "required": ["id", "object", "created", "model", "choices", "usage"],
        "properties": {
            "id": _TEXT,
            "object": {"const": kind},
            "created": _COUNT,
            "model": _TEXT,
            "choices": {
                "type": "array",
                "items": {
                    "type": "object",
                    "required": ["index", "finish_reason", "logprobs", *choice],
                    "properties": {**shared, "logprobs": {"type": ["object", "null"]}, **choice},
                },
            },
            "usage": {
                "type": "object",
                "required": ["prompt_tokens", "completion_tokens", "total_tokens"],
                "properties": {
                    "prompt_tokens": _COUNT,
                    "completion_tokens": _COUNT,
                    "total_tokens": _COUNT,
                },
            },
        },
    }


_NATIVE: Schema = {
    "type": "object",
    "required": ["text", "output_ids", "meta_info"],
    "properties": {
        "text": _TEXT,
        "output_ids": {"type": "array", "items": _COUNT},
        "meta_info": {"type": "object"},
    },
}
_CHAT = _answer("chat.completion", {"message": {"type": "object", "required": ["role"]}})
_COMPLETION = _answer("text_completion", {"text": _TEXT})
_NATIVE_ANSWER: Schema = {"anyOf": [_NATIVE, {"type": "array", "items": _NATIVE}]}
_ANSWERS: dict[str, Schema] = {
    "/v1/chat/completions": _CHAT,
    "/v1/completions": _COMPLETION,
    "/generate": _NATIVE_ANSWER,
    "/invocations": {"anyOf": [_CHAT, _COMPLETION, *_NATIVE_ANSWER["anyOf"]]},
    "/v1/models/{name}": _MODEL,
    "/v1/models": {
        "type": "object",
        "required": ["object", "data"],
        "properties": {"object": {"const": "list"}, "data": {"type": "array", "items": _MODEL}},
    },
    "/abort_request": {
        "type": "object",
        "required": ["aborted"],
        "properties": {"aborted": _COUNT},
    },
}


def describe(api: FastAPI, serving: Serving) -> None:
    """Completes what FastAPI generates, once the model's limits are known."""
    generate = api.openapi
    config = serving.config

    def openapi() -> Schema:
        info = serving.engine.info
        if info is None:
            api.openapi_schema = None
        elif api.openapi_schema is not None:
            return api.openapi_schema
        document = generate()
        schemas = document.setdefault("components", {}).setdefault("schemas", {})
        models = sorted({model for several in _BODIES.values() for model in several}, key=str)
        schemas.update(body_schemas(models, info, config.http.max_n))
        schemas["Error"] = _ERROR
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        for path, operations in document["paths"].items():
            needs_key = path in _ADMIN or (bool(config.api_keys) and path not in _OPEN)
            for method, operation in operations.items():
                _complete(operation, path, method)
                if needs_key:
                    operation["security"] = [{"key": []}]
        return document

    api.openapi = openapi  # type: ignore[method-assign]


def _complete(operation: Schema, path: str, method: str) -> None:
    responses: Schema = operation.setdefault("responses", {})
    responses.pop("422", None)  # FastAPI's own shape; here it is a 400
    content: Schema = {}
    if path == "/metrics":
        content["text/plain"] = {"schema": _TEXT}
    else:
        content["application/json"] = {"schema": _ANSWERS.get(path, {"type": "object"})}
    if path in _STREAMED:
        # no schema: OpenAPI 3.1 has none for the single event
        content["text/event-stream"] = {}
    responses["200"] = {"description": "The answer", "content": content}
    for status in _statuses(path, method):
        error: Schema = {"schema": {"$ref": f"{REF}Error"}}
        if path.endswith("/ready"):  # the error, and how far the start is, side by side
            error = {"schema": {"allOf": [error["schema"], {"type": "object"}]}}
        responses[status] = {"description": "Error", "content": {"application/json": error}}
    if method != "get" and path in _BODIES:
        names = [model.__name__ for model in _BODIES[path]]
        if path.endswith("/tokenize"):
            names[names.index("ChatRequest")] = TOKENIZE_CHAT
        several = [{"$ref": REF + name} for name in names]
        schema = several[0] if len(several) == 1 else {"anyOf": several}
        examples = {name: {"value": value} for name, value in EXAMPLES[path].items()}
        content = {"application/json": {"schema": schema, "examples": examples}}
        operation["requestBody"] = {"required": True, "content": content}


def _statuses(path: str, method: str) -> list[str]:
    found = {"421", "500"}
    if path not in _OPEN:
        found |= {"401", "403"}
    if path in _BODIES:
        found |= {"400", "408", "413", "415", "503"}
    if path in (*_OPEN, *_ADMIN, "/ping", "/health_generate"):
        found.add("503")
    if path in _ADMIN:
        found.add("409")
    if path == "/v1/models/{name}" or path in _BODIES:
        found.add("404")
    return sorted(found)
