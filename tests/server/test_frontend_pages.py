"""/metrics, /server_info, /graphs, /openapi.json, and what the log does and does not hold."""

from __future__ import annotations

import signal
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

COMPLETIONS = "/v1/completions"


def samples(http: httpx.Client) -> dict[str, float]:
    page = http.get("/metrics")
    assert page.headers["content-type"].startswith("text/plain; version=0.0.4")
    found = {}
    for family in text_string_to_metric_families(page.text):
        for sample in family.samples:
            labels = ",".join(f"{k}={v}" for k, v in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}"] = sample.value
    return found


def test_the_engines_snapshot_is_on_the_metrics_page(http: httpx.Client, eventually: Any) -> None:
    eventually(lambda: "sglang:num_requests_total{}" in samples(http), what="a snapshot")
    page = samples(http)
    assert "sglang:num_running_reqs{model_name=scripted}" in page
    assert "duograph_graph_replays_total{phase=decode,size=4}" in page
    # 1, 2 and 3 in the buckets: cumulative on the page
    assert page["sglang:queue_time_seconds_bucket{le=0.1}"] == 1
    assert page["sglang:queue_time_seconds_bucket{le=1.0}"] == 3
    assert page["sglang:queue_time_seconds_bucket{le=+Inf}"] == 6
    assert page["sglang:queue_time_seconds_count{}"] == 6
    assert page["sglang:queue_time_seconds_sum{}"] == 4.5


def test_the_frontend_counts_what_it_delivers(http: httpx.Client) -> None:
    before = samples(http)
    answer = http.post(COMPLETIONS, json={"prompt": "The quick", "n": 2}).json()["usage"]
    assert http.post(COMPLETIONS, json={"prompt": ""}).status_code == 400
    after = samples(http)

    def grown(name: str) -> float:
        return after[name] - before.get(name, 0.0)

    own = "{frontend=0}"
    assert grown(f"duograph_frontend_prompt_tokens_total{own}") == answer["prompt_tokens"]
    assert grown(f"duograph_frontend_generation_tokens_total{own}") == answer["completion_tokens"]
    assert grown("duograph_frontend_responses_total{frontend=0,status=400}") == 1
    assert grown("duograph_frontend_responses_total{frontend=0,status=200}") >= 1
    assert grown(f"duograph_frontend_time_to_first_token_seconds_count{own}") == 1
    assert grown(f"duograph_frontend_e2e_request_latency_seconds_count{own}") == 1
    assert after[f"duograph_frontend_active_requests{own}"] == 0


def test_server_info_has_flags_limits_and_the_engines_state(new_server: Any) -> None:
    server = new_server(frontend={"server_info": {"cuda_graph_max_bs": 8, "dtype": "auto"}})
    http = server.http()
    for path in ("/server_info", "/get_server_info"):
        info = http.get(path).json()
        assert info["cuda_graph_max_bs"] == 8
        assert info["context_length"] == 4096 and info["vocab_size"] == 512
        assert info["status"] == "ready"
        assert info["internal_states"][0]["graphs"] == {"decode": {"sizes": [1, 2, 4]}}


def test_graphs_shows_captures_and_counters(http: httpx.Client, eventually: Any) -> None:
    eventually(lambda: http.get("/graphs").json()["counters"], what="a snapshot")
    page = http.get("/graphs").json()
    assert list(page["decode"]["sizes"]) == ["1", "2", "4"]
    assert 'duograph_graph_replays_total{phase="decode",size="4"}' in page["counters"]


def test_the_routes_describe_themselves(http: httpx.Client) -> None:
    document = http.get("/openapi.json").json()
    assert {"/v1/chat/completions", "/v1/completions", "/v1/models"} <= set(document["paths"])
    body = document["paths"]["/v1/chat/completions"]["post"]["requestBody"]
    reference = body["content"]["application/json"]["schema"]["$ref"]
    schemas = document["components"]["schemas"]
    assert reference == "#/components/schemas/ChatRequest"
    properties = schemas["ChatRequest"]["properties"]
    assert {"messages", "temperature", "stop"} <= set(properties)


def test_the_log_has_one_line_a_request_and_no_text_of_it(new_server: Any) -> None:
    server = new_server(frontend={"api_keys": ("canary-key",)})
    http = server.http()
    hostile = ["/x%0d%0aforged%20line", "/y%1b[31m", "/" + "z" * 5000, "/q?secret=canary-query"]
    for path in hostile:
        assert http.get(path).status_code == 404
    body = {"prompt": "canary-prompt", "cache_salt": "canary-salt"}
    assert http.post(COMPLETIONS, json=body).status_code == 200
    assert http.get("/health").status_code == 200
    server.frontend.send_signal(signal.SIGTERM)
    assert server.frontend.wait(timeout=10) == 0
    lines = server.stderr.read_text().splitlines()
    assert "canary" not in "\n".join(lines)
    requests = [line for line in lines if " GET /" in line or " POST /" in line]
    assert len(requests) == len(hostile) + 1  # /health is not worth a line
    assert all(len(line) < 500 for line in lines)
    assert not any(line.startswith("forged") for line in lines)
    assert any(f"POST {COMPLETIONS} 200" in line for line in requests)


@pytest.mark.parametrize("path", ["/health", "/health/live", "/ready", "/health/ready"])
def test_load_balancers_may_ask_with_head(server: Any, path: str) -> None:
    answer = server.http().head(path)
    assert answer.status_code == 200 and answer.content == b""
