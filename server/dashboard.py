"""GET /: the dashboard, three files of this package over GET /graphs.

The files hold no data, so they need no key; the page asks for one if /graphs does. What the page
may load is said by its content security policy: itself, and nothing from elsewhere.
"""

from __future__ import annotations

from pathlib import Path

from fastapi import FastAPI
from starlette.responses import FileResponse

_FOLDER = Path(__file__).parent / "static" / "dashboard"
_FILES = {
    "/": ("index.html", "text/html"),
    "/dashboard/dashboard.js": ("dashboard.js", "text/javascript"),
    "/dashboard/dashboard.css": ("dashboard.css", "text/css"),
}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",  # an upgrade shows at once; unchanged files cost a 304 or little
}


def add_dashboard(api: FastAPI) -> None:
    for path, (name, kind) in _FILES.items():
        _add_file(api, path, name, kind)


def _add_file(api: FastAPI, path: str, name: str, kind: str) -> None:
    @api.get(path, include_in_schema=False)
    @api.head(path, include_in_schema=False)
    async def file() -> FileResponse:
        return FileResponse(_FOLDER / name, headers=_HEADERS, media_type=kind)
