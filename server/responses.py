"""JSON responses, as every route writes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson
from starlette.responses import Response

from duograph.server.errors import ApiError


def json_response(
    body: Any, *, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    return Response(orjson.dumps(body), status, headers=headers, media_type="application/json")


def error_response(error: ApiError) -> Response:
    return Response(
        error.body(), error.status, headers=error.headers, media_type="application/json"
    )
