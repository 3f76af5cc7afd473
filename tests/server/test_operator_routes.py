"""Routes for the operator: closed without an admin key, and what they do with one. And what
/docs and /openapi.json say."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from duograph.server.config import HttpConfig
from duograph.server.metrics import FrontendMetrics

ADMIN = ["/flush_cache", "/start_profile", "/stop_profile"]


@pytest.fixture(scope="module")
def guarded(model_folder: Path, tmp_path_factory: Any) -> Iterator[Any]:
    """A server with an ordinary and an admin key."""
    import tempfile

    from duograph.tests.server.conftest import start_server

    with tempfile.TemporaryDirectory(prefix="dg-") as run_dir:
        keys = {"api_keys": ("user-key",), "admin_keys": ("admin-key",)}
        server = start_server(model_folder, Path(run_dir), frontend=keys)
        yield server
        server.stop()


def call(server: Any, path: str, key: str | None, method: str = "POST", **options: Any) -> Any:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    return httpx.request(method, server.url + path, headers=headers, timeout=30, **options)


@pytest.mark.parametrize("method", ["GET", "POST"])
@pytest.mark.parametrize("path", ADMIN)
def test_they_are_closed_without_an_admin_key(http: Any, path: str, method: str) -> None:
    answer = http.request(method, path)
    assert answer.status_code == 403
    assert answer.json()["error"]["code"] == "admin_closed"
    assert "--admin-api-key" in answer.json()["error"]["message"]
    assert answer.headers["x-request-id"]


def test_abort_all_is_closed_without_an_admin_key(http: Any) -> None:
    answer = http.post("/abort_request", json={"abort_all": True})
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "admin_closed")


@pytest.mark.parametrize("path", ADMIN)
@pytest.mark.parametrize("key", [None, "user-key", "admin-kez"])
def test_another_key_does_not_open_them(guarded: Any, path: str, key: str | None) -> None:
    assert call(guarded, path, key).status_code == 401


@pytest.mark.parametrize("path", ADMIN)
def test_the_admin_key_opens_them(guarded: Any, path: str) -> None:
    assert call(guarded, path, "admin-key").json() == {"message": f"{path[1:]} done"}
    assert call(guarded, path, "admin-key", "GET").status_code == 200


def test_a_profile_takes_steps_and_no_path(guarded: Any) -> None:
    def start(**fields: Any) -> Any:
        return call(guarded, "/start_profile", "admin-key", json=fields)

    assert start(num_steps=5).status_code == 200
    assert guarded.received("ControlRequest")[-1]["argument"] == "5"
    for fields, param in (
        ({"num_steps": 0}, "num_steps"),
        ({"num_steps": 201}, "num_steps"),
        ({"output_dir": "/tmp"}, "output_dir"),
    ):
        assert start(**fields).json()["error"]["param"] == param
        # without a content-length, in chunks
        parts = iter([json.dumps(fields).encode()])
        headers = {"authorization": "Bearer admin-key", "content-type": "application/json"}
        answer = httpx.post(guarded.url + "/start_profile", content=parts, headers=headers)
        assert answer.json()["error"]["param"] == param


def test_the_admin_key_opens_everything_else_too(guarded: Any) -> None:
    body = {"prompt": "The quick"}
    assert call(guarded, "/v1/completions", "admin-key", json=body).status_code == 200
    assert call(guarded, "/v1/completions", "user-key", json=body).status_code == 200


@pytest.mark.parametrize(
    "path",
    ["/generate", "/tokenize", "/detokenize", "/abort_request", "/invocations", "/model_info",
     "/graphs", "/docs", "/openapi.json", "/ping", "/health_generate", "/metrics"],
)  # fmt: skip
def test_native_routes_need_the_key_as_well(guarded: Any, path: str) -> None:
    method = "GET" if path in ("/docs", "/ping") else "POST"
    assert call(guarded, path, None, method).status_code == 401


def test_abort_all_and_a_busy_cache(guarded: Any, eventually: Any) -> None:
    from concurrent.futures import ThreadPoolExecutor

    body = {"text": "The quick", "cache_salt": "hang"}
    with ThreadPoolExecutor(1) as pool:
        before = len(guarded.received("GenerateRequest"))
        running = pool.submit(call, guarded, "/generate", "user-key", json=body)
        eventually(lambda: len(guarded.received("GenerateRequest")) > before)
        refused = call(guarded, "/flush_cache", "admin-key")
        assert refused.status_code == 409
        assert "requests are in work" in refused.json()["error"]["message"]
        answer = call(guarded, "/abort_request", "admin-key", json={"abort_all": True})
        assert answer.json() == {"aborted": 1}
        assert running.result(10).json()["meta_info"]["finish_reason"]["type"] == "abort"


def test_keys_are_in_no_page(guarded: Any) -> None:
    for path in ("/server_info", "/metrics", "/openapi.json", "/model_info"):
        page = call(guarded, path, "user-key", "GET").text
        assert "admin-key" not in page and "user-key" not in page


def test_docs_load_nothing_from_elsewhere(http: Any) -> None:
    page = http.get("/docs")
    assert page.status_code == 200 and "http://" not in page.text and "https://" not in page.text
    assert "default-src 'none'" in page.headers["content-security-policy"]
    for name in ("swagger-ui-bundle.js", "swagger-ui.css", "start.js"):
        assert f"docs/{name}" in page.text or name == "start.js"
        part = http.get(f"/docs/{name}")
        assert part.status_code == 200 and len(part.content) > 50


def test_openapi_names_every_route_with_its_errors(http: Any) -> None:
    document = http.get("/openapi.json").json()
    for path in ("/generate", "/tokenize", "/detokenize", "/abort_request", "/graphs", *ADMIN):
        assert path in document["paths"], path
    assert not {path for path in document["paths"] if path.startswith("/docs")}
    chat = document["paths"]["/v1/chat/completions"]["post"]
    assert set(chat["responses"]) >= {"200", "400", "401", "404", "413", "415", "503"}
    assert "422" not in chat["responses"]
    assert set(chat["responses"]["200"]["content"]) == {"application/json", "text/event-stream"}
    body = document["components"]["schemas"]["ChatRequest"]["properties"]
    assert {"type": "null"} in body["n"]["anyOf"] and {"type": "null"} in body["seed"]["anyOf"]


def test_every_example_of_openapi_is_answered(http: Any) -> None:
    document = http.get("/openapi.json").json()
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            content = operation.get("requestBody", {}).get("content", {})
            if not operation.get("requestBody", {}).get("required"):
                continue
            examples = content["application/json"]["examples"]
            assert examples, path
            for name, example in examples.items():
                answer = http.request(method, path, json=example["value"])
                assert answer.status_code == 200, (path, name, answer.text)


def test_every_reference_of_openapi_leads_somewhere(http: Any) -> None:
    document = http.get("/openapi.json").json()

    def references(node: Any) -> Iterator[str]:
        if isinstance(node, dict):
            for key, value in node.items():
                if key == "$ref":
                    yield value
                else:
                    yield from references(value)
        elif isinstance(node, list):
            for item in node:
                yield from references(item)

    found = set(references(document))
    assert found
    for reference in found:
        name = reference.removeprefix("#/components/schemas/")
        assert name in document["components"]["schemas"], reference


def test_graphs_join_captures_and_replays(http: Any, eventually: Any) -> None:
    page = eventually(lambda: _with_replays(http), what="a snapshot")
    assert set(page) >= {"decode", "prefill", "eager_steps", "counters"}
    assert page["decode"]["sizes"]["4"]["replays"] >= 0


def _with_replays(http: Any) -> Any:
    page = http.get("/graphs").json()
    return page if "replays" in page["decode"]["sizes"].get("4", {}) else None


@pytest.mark.parametrize(("method", "path"), [("GET", "/ping"), ("POST", "/v1/completions")])
async def test_an_exception_of_ours_is_a_500_in_the_envelope(method: str, path: str) -> None:
    from duograph.server.app import create_app

    class Broken:
        """A serving whose every answer is a bug."""

        class config:
            http = HttpConfig()
            api_keys: tuple[str, ...] = ()
            admin_keys: tuple[str, ...] = ()
            served_names = ("tiny",)

        metrics = FrontendMetrics()
        engine = None

        def unavailable(self) -> Any:
            raise KeyError("a bug")

        async def completion(self, _request: Any) -> Any:
            raise KeyError("a bug")

        chat = generate = completion

    transport = httpx.ASGITransport(create_app(Broken()), raise_app_exceptions=False)  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        answer = await client.request(method, path)
    assert answer.status_code == 500
    assert answer.json()["error"]["type"] == "server_error"
    assert answer.headers["x-request-id"] and "KeyError" not in answer.text


@pytest.mark.parametrize(
    ("path", "methods"),
    [("/health", "GET, HEAD"), ("/flush_cache", "GET, POST"), ("/generate", "POST, PUT")],
)
def test_a_wrong_method_is_told_all_the_right_ones(guarded: Any, path: str, methods: str) -> None:
    answer = call(guarded, path, "admin-key", "DELETE")
    assert (answer.status_code, answer.headers["allow"]) == (405, methods)


def test_openapi_asks_for_a_key_where_one_is_needed(http: Any, guarded: Any) -> None:
    def needing(document: Any) -> set[str]:
        paths = document["paths"].items()
        return {path for path, ops in paths if any("security" in op for op in ops.values())}

    assert needing(http.get("/openapi.json").json()) == set(ADMIN)
    everything = call(guarded, "/openapi.json", "user-key", "GET").json()
    assert set(everything["paths"]) - needing(everything) == {
        "/health", "/health/live", "/health/ready", "/ready",
    }  # fmt: skip


def test_openapi_knows_the_limits_of_the_model(http: Any) -> None:
    schemas = http.get("/openapi.json").json()["components"]["schemas"]
    text = str(schemas["CompletionRequest"]["properties"]["prompt"])
    assert "'maximum': 511" in text and "'maxItems': 4095" in text
    assert "'maximum': 8" in str(schemas["ChatRequest"]["properties"]["n"])
