"""/graphs of a real engine after real requests: the sizes used, and the files of the page."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from duograph.tests.e2e.server_process import ServerProcess, eventually

pytestmark = pytest.mark.slow


def figures(server: ServerProcess) -> dict[str, Any]:
    status, body = server.get("/graphs")
    assert status == 200, body
    page: dict[str, Any] = json.loads(body)
    return page


def steps_of(page: dict[str, Any], phase: str) -> int:
    return sum(row["steps"] for row in page[phase]["steps_by_size"])


def test_the_sizes_that_requests_used_appear(server: ServerProcess, client: openai.OpenAI) -> None:
    before = figures(server)

    def complete(_: int) -> None:
        client.completions.create(
            model="tiny",
            prompt="the quick brown fox",
            max_tokens=40,
            extra_body={"ignore_eos": True},
        )

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(complete, range(6)))
    eventually(
        lambda: steps_of(figures(server), "decode") >= steps_of(before, "decode") + 78,
        15,
        "six answers of 39 decode steps, three at once",
    )
    page = figures(server)
    decode = page["decode"]
    used = {size for size, one in decode["sizes"].items() if "last_used" in one}
    assert used, "no size was used"
    for size in used:
        one = decode["sizes"][size]
        assert one["replays"] > 0 and one["seconds"] > 0
    largest = max(row["size"] for row in decode["steps_by_size"])
    assert largest >= 2, "requests ran side by side"
    assert any(one.get("step_ms", 0) > 0 for one in decode["sizes"].values())
    assert decode["totals"]["hit_rate"] > 0 and page["prefill"]["totals"]["replays"] > 0
    assert sum(page["start_seconds"].values()) > 0 and page["backend"] == "recorded"
    assert page["memory"]["weights"] > 0 and page["memory"]["total"] > page["memory"]["free"] > 0
    assert page["latency"]["time_to_first_token"]["p50"] > 0
    assert page["load"]["kv_total_tokens"] > 0


def test_the_page_is_in_the_package(server: ServerProcess) -> None:
    for path in ("/", "/dashboard/dashboard.js", "/dashboard/dashboard.css"):
        status, body = server.get(path)
        assert status == 200 and len(body) > 1000
