"""GET /docs: Swagger UI over /openapi.json, from files of this package and no other place.

The page may load nothing from elsewhere, which its content security policy says.
"""

from __future__ import annotations

from pathlib import Path

from fastapi import FastAPI
from starlette.responses import FileResponse, Response

_FOLDER = Path(__file__).parent / "static" / "swagger-ui"
_FILES = {"swagger-ui-bundle.js": "text/javascript", "swagger-ui.css": "text/css"}
_POLICY = (
    "default-src 'none'; script-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "style-src 'self' 'unsafe-inline'; font-src 'self' data:; frame-ancestors 'none'"
)
# Paths are relative, so that the page also works behind a proxy's prefix.
_PAGE = b"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>duograph API</title>
<link rel="stylesheet" href="docs/swagger-ui.css">
</head>
<body>
<div id="swagger-ui"></div>
<script src="docs/swagger-ui-bundle.js"></script>
<script src="docs/start.js"></script>
</body>
</html>
"""
_START = b"""SwaggerUIBundle({url: "openapi.json", dom_id: "#swagger-ui", validatorUrl: null});
"""
_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}


def add_docs(api: FastAPI) -> None:
    @api.get("/docs", include_in_schema=False)
    async def page() -> Response:
        return Response(_PAGE, headers=_HEADERS, media_type="text/html")

    @api.get("/docs/start.js", include_in_schema=False)
    async def start() -> Response:
        return Response(_START, headers=_HEADERS, media_type="text/javascript")

    for name, kind in _FILES.items():
        _add_file(api, name, kind)


def _add_file(api: FastAPI, name: str, kind: str) -> None:
    @api.get(f"/docs/{name}", include_in_schema=False)
    async def file() -> Response:
        headers = _HEADERS | {"cache-control": "public, max-age=86400"}
        return FileResponse(_FOLDER / name, headers=headers, media_type=kind)
