"""The dashboard: its files, what they may load, and that /graphs has what they read."""

from __future__ import annotations

import re
import shlex
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from duograph.scheduler.graph_metrics import graph_metrics
from duograph.scheduler.last_use import LastUse
from duograph.scheduler.messages import EngineInfo, EngineStatus
from duograph.scheduler.stats import SchedulerStats, snapshot
from duograph.server.arg_checks import check_together
from duograph.server.args import parse_serve
from duograph.server.graph_report import graphs
from duograph.server.options import UsageError
from duograph.tests.scheduler.driver import Driver
from duograph.tests.scheduler.test_stats import GRAPH_STATS

FILES = {
    "/": "text/html",
    "/dashboard/dashboard.js": "text/javascript",
    "/dashboard/dashboard.css": "text/css",
}


@pytest.mark.parametrize(("path", "kind"), FILES.items())
def test_the_files_have_their_types_and_load_nothing_from_elsewhere(
    http: httpx.Client, path: str, kind: str
) -> None:
    answer = http.get(path)
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith(kind)
    assert answer.headers["x-content-type-options"] == "nosniff"
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'") and "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy
    text = answer.text.replace("http://www.w3.org/2000/svg", "")  # a name, nothing is loaded
    assert not re.search(r"(https?:)?//[a-z0-9.-]+\.[a-z]", text), "an address elsewhere"
    assert http.head(path).status_code == 200


def test_the_page_needs_only_what_its_policy_allows(http: httpx.Client) -> None:
    page, script = http.get("/").text, http.get("/dashboard/dashboard.js").text
    assert not re.search(r"\son[a-z]+=|<style|style=|<script>", page), "inline code or style"
    for path in re.findall(r'(?:src|href)="(dashboard/[^"]+)"', page):
        assert f"/{path}" in FILES
    for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
        assert word not in script, "data must reach the page as text"
    assert "localStorage" not in script and "sessionStorage" not in script, "the key stays here"


def test_every_element_that_the_script_asks_for_is_on_the_page(http: httpx.Client) -> None:
    page, script = http.get("/").text, http.get("/dashboard/dashboard.js").text
    present = set(re.findall(r'id="([^"]+)"', page))
    wanted = set(re.findall(r'(?:byId|draw)\("([^"]+)"', script))
    wanted |= {
        prefix + phase
        for prefix in re.findall(r"(?:byId|draw)\(`([a-z]+-)\$\{name\}`", script)
        for phase in ("decode", "prefill")
    }
    assert len(wanted) > 15 and wanted <= present


def test_the_page_is_open_and_its_data_need_the_key(new_server: Any) -> None:
    http = new_server(frontend={"api_keys": ("the-key",)}).http()
    http.headers.pop("authorization", None)
    for path in FILES:
        answer = http.get(path)
        assert answer.status_code == 200 and "scripted" not in answer.text
    assert http.get("/graphs").status_code == 401
    assert http.get("/dashboard/other.js").status_code == 401
    answer = http.get("/graphs", headers={"authorization": "Bearer the-key"})
    assert answer.status_code == 200 and "the-key" not in answer.text
    assert http.post("/").status_code == 405


def test_polling_leaves_no_line_in_the_log(new_server: Any, eventually: Any) -> None:
    server = new_server()
    http = server.http()
    for path in (*FILES, "/graphs"):
        assert http.get(path).status_code == 200
    assert http.get("/nowhere").status_code == 404
    eventually(lambda: "GET /nowhere" in server.stderr.read_text(), what="the log")
    assert not re.search(r"GET (/|/graphs|/dashboard\S*) 200", server.stderr.read_text())


def test_a_server_without_a_snapshot_answers_in_the_same_shape() -> None:
    page = report(with_info=False)
    assert page["status"] == "capturing_decode" and page["progress"] == {"done": 3, "total": 36}
    assert page["load"] == {} and page["latency"] == {} and page["memory"] == {}
    for phase in ("decode", "prefill"):
        assert page[phase]["advice"] is None and page[phase]["steps_by_size"] == []
        assert page[phase]["totals"]["hit_rate"] is None


def test_graphs_says_what_each_phase_costs_saves_and_wastes() -> None:
    page = report()
    totals = page["decode"]["totals"]
    assert totals["capture_seconds"] == 0.75 and totals["nbytes"] == 150
    assert (totals["replays"], totals["eager_steps"]) == (5, 7)
    assert totals["hit_rate"] == 5 / 12
    assert (totals["real"], totals["padded"]) == (12, 2)
    assert (totals["unused_sizes"], totals["unused_nbytes"]) == (1, 50), "size 1: warm-up only"
    assert page["decode"]["sizes"]["4"]["last_used"] == 1.8e9
    assert "last_used" not in page["decode"]["sizes"]["1"]
    assert page["prefill"]["totals"]["hit_rate"] == 0.0


def test_graphs_has_the_actual_sizes_and_their_times() -> None:
    page = report()
    rows = {row["size"]: row for row in page["decode"]["steps_by_size"]}
    assert (rows[3]["steps"], rows[3]["total"]) == (300, 900)
    assert rows[3]["ms"] == pytest.approx(20.0)
    assert page["decode"]["sizes"]["4"]["step_ms"] == pytest.approx(20.0)
    assert "step_ms" not in page["decode"]["sizes"]["1"]


def test_graphs_gives_advice_with_a_flag_to_copy() -> None:
    advice = report()["decode"]["advice"]
    assert [(c["action"], c["size"]) for c in advice["changes"]] == [("add", 3)]
    assert advice["changes"][0]["padding_saved"] == 300
    assert advice["changes"][0]["cost"] == {"seconds": 0.25, "nbytes": 50}
    assert (advice["seconds_added"], advice["nbytes_added"]) == (0.25, 50)
    assert advice["flag"] == "--cuda-graph-bs 1 3 4"
    none = report()["prefill"]["advice"]
    assert none["flag"] == "" and "no graphs" in none["reason"]


def test_the_flag_raises_a_limit_that_would_refuse_it() -> None:
    page = report(flags={"cuda_graph_max_bs": 4}, rows=6)
    assert page["decode"]["advice"]["flag"] == "--cuda-graph-bs 1 4 6 --cuda-graph-max-bs 6"


def test_the_command_line_takes_the_flag_as_it_is_copied() -> None:
    given = ["--cuda-graph-max-bs", "4"]
    flag = report(flags={"cuda_graph_max_bs": 4}, rows=6)["decode"]["advice"]["flag"]
    config = parse_serve([*given, *shlex.split(flag)], {})
    assert config.runner.graph.cuda_graph_bs == (1, 4, 6)
    assert list(check_together(config)) == []
    with pytest.raises(UsageError, match="cuda-graph-max-bs"):
        check_together(parse_serve([*given, "--cuda-graph-bs", "1", "4", "6"], {}))


def test_no_advice_where_every_size_is_needed() -> None:
    advice = report(flags={"disable_cuda_graph_padding": True})["decode"]["advice"]
    assert advice["changes"] == () and advice["flag"] == "" and "padding is off" in advice["reason"]
    assert advice["sizes"] == (1, 4)


def test_memory_adds_up_to_the_device() -> None:
    memory = report()["memory"]
    parts = ("weights", "kv_cache", "decode_graphs", "prefill_graphs", "free", "other")
    assert sum(memory[part] for part in parts) == memory["total"] == 1 << 33
    assert memory["kv_token"] == (1 << 30) // 4096


def test_latencies_are_read_off_the_histograms() -> None:
    first = report()["latency"]["time_to_first_token"]
    assert first["count"] == 10 and first["mean"] == pytest.approx(0.2)
    assert 0.1 <= first["p50"] <= 0.25 and first["p50"] < first["p99"] <= 0.25


def test_graphs_has_every_field_that_the_script_reads(http: httpx.Client) -> None:
    script = http.get("/dashboard/dashboard.js").text
    page = report()
    wanted = set(re.findall(r"\bpage\.([a-z_]+)", script))
    assert len(wanted) > 8 and wanted <= page.keys()
    decode = page["decode"]
    for pattern, found in (
        (r"\btotals\.([a-z_]+)", decode["totals"]),
        (r'\bsum\("([a-z_]+)"\)', decode["totals"]),
        (r"\badvice\.([a-z_]+)", decode["advice"]),
        (r"\bchange\.([a-z_]+)", decode["advice"]["changes"][0]),
        (r"\brow\.([a-z_]+)", decode["steps_by_size"][0]),
        (r"\bpage\.memory\.([a-z_]+)", page["memory"]),
        (r"\bpage\.load\.([a-z_]+)", page["load"]),
    ):
        names = set(re.findall(pattern, script)) - {"flatMap", "map", "reduce", "filter"}
        assert names and {name for name in names if not name.startswith("flat")} <= found.keys()


def report(
    *, with_info: bool = True, flags: dict[str, Any] | None = None, rows: int = 3
) -> dict[str, Any]:
    """/graphs of an engine with two captured sizes and 300 steps of ``rows`` rows."""
    engine = SimpleNamespace(
        info=None, snapshot=None, status=EngineStatus("capturing_decode", 3, 36)
    )
    if with_info:
        stats = SchedulerStats()
        for step in range(300):
            stats.observe_step(False, rows, 0.02 * step, True)
        for _ in range(10):
            stats.time_to_first_token.observe(0.2)
        counters, gauges = graph_metrics(GRAPH_STATS)
        last = LastUse()
        unused = {"sizes": {"1": {"replays": 2}, "4": {"replays": 0}}}
        last.update({"decode": unused, "prefill": {"sizes": {}}}, 1.0)
        engine.snapshot = snapshot(
            stats,
            Driver().scheduler.gauges(),
            model_name="tiny",
            gen_throughput=0.0,
            graph_counters=counters,
            graph_gauges=gauges | last.update(GRAPH_STATS, 1.8e9),
        )
        engine.info = EngineInfo(
            max_total_num_tokens=4096,
            max_running_requests=64,
            context_length=4096,
            vocab_size=512,
            details={
                "graphs": GRAPH_STATS | {"backend": "recorded"},
                "memory": {"total": 1 << 33, "free": 1 << 32},
                "device": "cpu",
                "chunked_prefill_size": 512,
            },
        )
        engine.status = EngineStatus("ready")
    config = SimpleNamespace(served_names=("tiny",), server_info=flags or {})
    serving: Any = SimpleNamespace(engine=engine, config=config, draining=False)
    return graphs(serving)
