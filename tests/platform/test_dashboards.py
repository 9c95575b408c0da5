"""The dashboards on a real Prometheus that scrapes a real platform: every panel shows something."""

import json
import math
import shutil
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest
import yaml

from tests.fixtures.patience import until_seen
from tests.fixtures.platform import Platform
from tests.programs import reason

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
FUNCTION = "dashboards"
TENANT = "dashboard-tenant"
# What Grafana fills in: of its variables all values, and a range of several scrapes.
FILLED = {"$__rate_interval": "30s", "$function": FUNCTION, "$tenant": ".*"}


@dataclass
class Prometheus:
    """A server that scrapes the platform every second."""

    http: httpx2.Client

    def get(self, path: str, **parameters: str) -> Any:
        answer = self.http.get(f"/api/v1/{path}", params=parameters).json()
        assert answer["status"] == "success", answer
        return answer["data"]

    def shows(self, expression: str) -> bool:
        """Return whether the query has a number, which NaN is not."""
        found = self.get("query", query=expression)["result"]
        return any(not math.isnan(float(row["value"][1])) for row in found)

    def until_shown(self, expression: str) -> None:
        """Wait until the query has a number."""
        until_seen(expression, lambda: self.shows(expression))


def expressions() -> dict[str, str]:
    """Return the queries of all panels, by the panel and the number of the query."""
    found = {}
    for path in sorted((DEPLOY / "grafana").glob("*.json")):
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel["targets"]:
                expression = target["expr"]
                for name, value in FILLED.items():
                    expression = expression.replace(name, value)
                found[f"{path.stem}: {panel['title']} {target['refId']}"] = expression
    return found


@pytest.fixture(scope="module")
def prometheus(platform: Platform, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip(reason(["prometheus"]))
    folder = tmp_path_factory.mktemp("prometheus")
    config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yaml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["rule_files"] = [str(DEPLOY / "prometheus" / name) for name in config["rule_files"]]
    (job,) = config["scrape_configs"]
    del job["dns_sd_configs"]
    job["static_configs"] = [{"targets": [platform.url.removeprefix("http://")]}]
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(
            [
                program,
                f"--config.file={folder / 'prometheus.yaml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address={address}",
            ],
            stdout=log,
            stderr=log,
        )
    http = httpx2.Client(base_url=f"http://{address}", trust_env=False, timeout=60)

    def is_up() -> bool:
        try:
            return http.get("/-/ready").status_code == 200
        except httpx2.TransportError:
            assert server.poll() is None, (folder / "log").read_text()
            return False

    try:
        until_seen("Prometheus is ready", is_up)
        yield Prometheus(http)
    finally:
        http.close()
        server.terminate()
        server.wait()


def test_every_panel_shows_something(platform: Platform, prometheus: Prometheus, root: Path) -> None:
    model = root / "functions" / "tiny-coder" / "model"
    platform.run("deploy", str(model), "--name", FUNCTION, "--keep-alive", "10m")
    key = platform.json("keys", "create", "--tenant", TENANT, "--name", "k")["key"]

    def answered(key: str) -> int:
        body = {"model": FUNCTION, "prompt": "def add(", "max_tokens": 8, "ignore_eos": True}
        with platform.http() as http:
            headers = {"authorization": f"Bearer {key}"}
            return http.post("/v1/completions", json=body, headers=headers).status_code

    def keep(instances: int) -> None:
        scaling = {"scaling": {"min_instances": instances}}
        with platform.http() as http:
            assert http.patch(f"/admin/functions/{FUNCTION}", json=scaling).status_code == 200

    def scraped(name: str) -> float:
        found = prometheus.get("query", query=f'sum({name}{{function="{FUNCTION}"}})')["result"]
        return float(found[0]["value"][1]) if found else 0.0

    # Prometheus shows how much a counter grows, so it has to see it before: a start, then further ones.
    assert answered(platform.key) == answered(key) == 200
    platform.until("the first start is scraped", lambda: scraped("hypercast_init_duration_seconds_count"))
    platform.run("scale", FUNCTION, "--instances", "2")
    platform.until("the first cast is scraped", lambda: scraped("hypercast_cast_duration_seconds_count"))
    platform.run("scale", FUNCTION, "--instances", "3")

    empty = expressions()
    assert len(empty) > 50
    assert not prometheus.shows("hypercast_unknown") and not prometheus.shows("vector(0) / vector(0)")

    def all_shown() -> bool:
        assert answered(platform.key) == answered(key) == 200
        for name, expression in list(empty.items()):
            if prometheus.shows(expression):
                del empty[name]
        return not empty

    until_seen("all panels show something", all_shown, failing=lambda: json.dumps(empty, indent=1))

    of = f'{{model_name="{FUNCTION}",engine="0"}}'
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        prometheus.until_shown(f"vllm:{name}{of}")
    prometheus.until_shown(f"histogram_quantile(0.5, rate(vllm:inter_token_latency_seconds_bucket{of}[30s]))")

    # Two more instances than there are nodes.
    keep(5)
    pool = '{gpus="0",handlers="true"}'
    prometheus.until_shown(f"max(hypercast_nodes_lacking{pool}) >= 2")
    prometheus.until_shown(f"max(hypercast_nodes_wanted{pool}) >= 5")
    keep(0)
    prometheus.until_shown(f"max(hypercast_nodes_lacking{pool}) == 0")
    platform.run("delete", FUNCTION, "--yes")


def test_all_alerts_can_be_evaluated(prometheus: Prometheus) -> None:
    def evaluated() -> list[dict[str, Any]]:
        found = prometheus.get("rules")["groups"]
        rules = [rule for group in found for rule in group["rules"]]
        return rules if all(rule["health"] != "unknown" for rule in rules) else []

    rules = until_seen("all rules have been evaluated", evaluated)
    assert len(rules) > 20
    assert not [rule["name"] for rule in rules if rule["health"] != "ok"]
