"""What docker/ has for Prometheus, Grafana and Kubernetes: files that parse, name metrics that
are on /metrics, and lead to ports, routes and files that exist."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from duograph.server.config import HttpConfig
from duograph.tests.server.test_metrics_page import page as page  # a fixture

DOCKER = Path(__file__).parents[2] / "docker"
DASHBOARD = DOCKER / "monitoring" / "grafana" / "dashboards" / "duograph.json"
FUNCTIONS = {"sum", "max", "rate", "histogram_quantile", "sort_desc"}
SELECTOR = re.compile(r"([a-zA-Z_:][\w:]*)\{([^}]*)\}")
GROUPING = re.compile(r"\b(?:by|without) \(([^)]*)\)")
# Given to every sample by Prometheus itself, or by the page of one process.
SCRAPED = {"instance", "job"}


def dashboard() -> Any:
    return json.loads(DASHBOARD.read_text())


def queries() -> list[tuple[str, str, str]]:
    """Panel, expression and legend."""
    return [
        (panel["title"], target["expr"], target["legendFormat"])
        for panel in dashboard()["panels"]
        for target in panel.get("targets", [])
    ]


def manifest(name: str) -> list[Any]:
    return list(yaml.safe_load_all((DOCKER / name).read_text()))


def labels_on(page: str) -> dict[str, set[str]]:
    """The labels of every sample name on a /metrics page."""
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def unknown_names(page: str) -> list[str]:
    """What the dashboard asks for and the page does not have: metrics, labels, functions."""
    there, problems = labels_on(page), []
    for title, expression, legend in queries():
        selectors = SELECTOR.findall(expression)
        grouped = {
            label.strip() for names in GROUPING.findall(expression) for label in names.split(",")
        }
        matched = {re.split(r"[=!~]", part)[0].strip() for _, parts in selectors
                   for part in parts.split(",") if part.strip()}  # fmt: skip
        wanted = grouped | matched | set(re.findall(r"\{\{(\w+)\}\}", legend))
        bare = re.sub(r'"[^"]*"', "", GROUPING.sub("", SELECTOR.sub("", expression)))
        functions = set(re.findall(r"[a-zA-Z_]\w*", re.sub(r"\[[^]]*\]", "", bare)))
        problems += [f"{title}: function {name}" for name in functions - FUNCTIONS]
        if not selectors:
            problems.append(f"{title}: no metric")
        for name, _ in selectors:
            if name not in there:
                problems.append(f"{title}: {name}")
            else:
                problems += [f"{title}: {name} has no {label}"
                             for label in wanted - SCRAPED - there[name]]  # fmt: skip
    return problems


def test_every_metric_and_label_of_the_dashboard_is_on_the_page(page: str) -> None:
    assert len(queries()) > 40
    assert unknown_names(page) == []


def test_a_metric_that_goes_missing_is_noticed(page: str) -> None:
    without = page.replace("duograph_graph_eager_total", "duograph_graph_slow_total")
    assert any("duograph_graph_eager_total" in problem for problem in unknown_names(without))
    assert unknown_names(page.replace('reason="', 'why="'))


def test_panels_have_names_and_places_of_their_own() -> None:
    document = dashboard()
    panels = document["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"])
                 for y in range(place["h"])}  # fmt: skip
        assert not taken & cells, panel["title"]
        taken |= cells
    [source] = yaml.safe_load(
        (DOCKER / "monitoring/grafana/provisioning/datasources/prometheus.yaml").read_text()
    )["datasources"]
    used = {panel["datasource"]["uid"] for panel in panels if panel["type"] != "row"}
    used |= {variable["datasource"]["uid"] for variable in document["templating"]["list"]}
    assert used == {source["uid"]}


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_promtool_reads_every_query_and_the_configuration(tmp_path: Path) -> None:
    rules = [
        {"record": f"panel:query_{number}", "expr": expression.replace("$__rate_interval", "1m")}
        for number, (_, expression, _) in enumerate(queries())
    ]
    file = tmp_path / "rules.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    for command in (
        ["check", "rules", str(file)],
        ["check", "config", "--syntax-only", str(DOCKER / "monitoring" / "prometheus.yml")],
    ):
        done = subprocess.run(["promtool", *command], capture_output=True, text=True, timeout=30)
        assert done.returncode == 0, done.stdout + done.stderr


def test_compose_mounts_files_that_exist_and_volumes_that_it_declares() -> None:
    [compose] = manifest("compose.yaml")
    services = compose["services"]
    for name, service in services.items():
        for mount in service.get("volumes", []):
            source = mount.split(":")[0]
            if source.startswith("."):
                assert (DOCKER / source).exists(), (name, source)
            else:
                assert source in compose["volumes"], (name, source)
        assert set(service.get("depends_on", [])) <= services.keys()
    build = services["duograph"]["build"]
    dockerfile = (DOCKER / build["context"] / build["dockerfile"]).read_text()
    stages = set(re.findall(r"^FROM .* AS (\w+)$", dockerfile, re.MULTILINE))
    assert {"cuda", "cpu"} <= stages
    assert re.fullmatch(r"\$\{DUOGRAPH_TARGET:-(\w+)\}", build["target"])[1] in stages  # type: ignore[index]


def test_everything_meets_at_the_servers_port() -> None:
    port = HttpConfig().port
    [compose], [prometheus] = manifest("compose.yaml"), manifest("monitoring/prometheus.yml")
    assert f"EXPOSE {port}\n" in (DOCKER / "Dockerfile").read_text()
    [published] = compose["services"]["duograph"]["ports"]
    assert published.endswith(f":{port}")
    [job] = prometheus["scrape_configs"]
    [target] = job["static_configs"][0]["targets"]
    host, scraped = target.split(":")
    assert host in compose["services"] and int(scraped) == port
    assert job.get("metrics_path", "/metrics") == "/metrics"
    documents = {document["kind"]: document for document in manifest("k8s.yaml")}
    pod = documents["Deployment"]["spec"]["template"]
    [container] = pod["spec"]["containers"]
    assert [entry["containerPort"] for entry in container["ports"]] == [port]
    assert pod["metadata"]["annotations"]["prometheus.io/port"] == str(port)
    [service] = documents["Service"]["spec"]["ports"]
    assert service["port"] == port
    assert service["targetPort"] in {entry["name"] for entry in container["ports"]}


def test_prometheus_reads_the_key_that_the_server_asks_for() -> None:
    [compose], [prometheus] = manifest("compose.yaml"), manifest("monitoring/prometheus.yml")
    [job] = prometheus["scrape_configs"]
    [mounted] = compose["services"]["prometheus"]["configs"]
    assert job["authorization"]["credentials_file"] == mounted["target"]
    content = compose["configs"][mounted["source"]]["content"]
    assert content.startswith("${DUOGRAPH_API_KEY:-")
    assert (
        "${DUOGRAPH_API_KEY" in compose["services"]["duograph"]["environment"]["DUOGRAPH_API_KEY"]
    )


def test_probes_ask_routes_that_exist_and_names_fit_together(http: Any) -> None:
    documents = {document["kind"]: document for document in manifest("k8s.yaml")}
    pod = documents["Deployment"]["spec"]["template"]
    [container] = pod["spec"]["containers"]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        get = container[probe]["httpGet"]
        assert http.get(get["path"]).status_code == 200
        assert get["port"] in {entry["name"] for entry in container["ports"]}
    assert http.get(pod["metadata"]["annotations"]["prometheus.io/path"]).status_code == 200
    volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes.keys()
    claim = documents["PersistentVolumeClaim"]["metadata"]["name"]
    assert volumes["cache"]["persistentVolumeClaim"]["claimName"] == claim
    labels = pod["metadata"]["labels"]
    for selector in (
        documents["Service"]["spec"]["selector"],
        documents["Deployment"]["spec"]["selector"]["matchLabels"],
    ):
        assert selector.items() <= labels.items()
    drain = int(container["args"][container["args"].index("--shutdown-timeout") + 1])
    assert pod["spec"]["terminationGracePeriodSeconds"] > drain
