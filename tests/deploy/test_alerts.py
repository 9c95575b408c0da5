"""The alerts: checked by Prometheus's own tool, and about metrics, labels and codes that a gateway has."""

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.fixtures.manifests import KUBERNETES, ports_of
from tests.fixtures.platform import Platform
from tests.fixtures.promql import metrics_in
from tests.programs import reason

PROMETHEUS = KUBERNETES.parent / "prometheus"
HTTP = (KUBERNETES.parents[1] / "docs" / "HTTP.md").read_text()

# Of kube-state-metrics, the kubelet and cert-manager.
FOREIGN = {
    "certmanager_certificate_expiration_timestamp_seconds",
    "container_memory_working_set_bytes",
    "kube_cronjob_created",
    "kube_cronjob_status_last_successful_time",
    "kube_pod_container_resource_limits",
    "kubelet_volume_stats_available_bytes",
    "kubelet_volume_stats_capacity_bytes",
}


def rules(name: str) -> list[dict[str, Any]]:
    groups = yaml.safe_load((PROMETHEUS / name).read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


EVERY = [*rules("alerts.yaml"), *rules("alerts-kubernetes.yaml")]


def promtool(*arguments: object) -> subprocess.CompletedProcess[str]:
    program = shutil.which("promtool")
    if program is None:
        pytest.skip(reason(["promtool"]))
    return subprocess.run([program, *map(str, arguments)], capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    "command",
    [
        ("check", "rules", "alerts.yaml", "alerts-kubernetes.yaml"),
        ("check", "config", "prometheus.yaml"),
        ("test", "rules", "tests.yaml"),
    ],
    ids=lambda command: " ".join(command[:2]),
)
def test_prometheus_accepts_them_and_each_fires_when_it_should(command: tuple[str, ...]) -> None:
    what, kind, *files = command
    done = promtool(what, kind, *(PROMETHEUS / file for file in files))
    assert done.returncode == 0, done.stdout + done.stderr


def test_its_tests_find_an_alert_that_never_or_always_fires(tmp_path: Path) -> None:
    shutil.copytree(PROMETHEUS, tmp_path, dirs_exist_ok=True)
    for slip in ("== 0\n        for: 1m", ">= 0\n        for: 1m"):
        text = (PROMETHEUS / "alerts.yaml").read_text()
        (tmp_path / "alerts.yaml").write_text(text.replace("== 0\n        for: 1m", slip, 1))
        done = promtool("test", "rules", tmp_path / "tests.yaml")
        assert (done.returncode == 0) == (slip.startswith("==")), done.stdout


def test_every_alert_has_a_case_in_which_it_fires() -> None:
    text = (PROMETHEUS / "tests.yaml").read_text()
    names = [rule["alert"] for rule in EVERY]
    assert len(names) == len(set(names)) > 10
    assert not [name for name in names if f'{{alertname="{name}"}}\', value: 1' not in text]
    assert all(rule["labels"]["severity"] in ("warning", "critical") for rule in EVERY)
    assert all(rule["annotations"]["summary"] for rule in EVERY)


def test_they_read_metrics_that_exist(platform: Platform) -> None:
    read = {metric for rule in EVERY for metric in metrics_in(rule["expr"])}
    assert {metric for metric in read if not metric.startswith("hypercast_")} == FOREIGN | {"up"}
    with platform.http() as http:
        text = http.get("/metrics").text
    exposed = dict(re.findall(r"^# TYPE (\w+) (\w+)$", text, re.MULTILINE))
    histograms = {name for name, kind in exposed.items() if kind == "histogram"}
    known = exposed.keys() | {
        f"{name}{part}" for name in histograms for part in ("_bucket", "_count", "_sum")
    }
    assert {metric for metric in read if metric.startswith("hypercast_")} <= known


def selectors() -> Iterator[tuple[str, str]]:
    """(metric, content of the braces) for each metric of ours that an alert selects by labels."""
    for rule in EVERY:
        yield from re.findall(r"(hypercast_\w+)\{([^}]*)\}", rule["expr"])


def test_labels_and_codes_are_those_of_the_reference() -> None:
    codes = {
        code for line in HTTP.splitlines() if line.startswith("|") for code in re.findall(r"`(\w+)`", line)
    }
    for metric, selector in selectors():
        family = re.sub(r"_(bucket|count|sum)$", "", metric)
        (row,) = (line for line in HTTP.splitlines() if line.startswith(f"| `{family}`"))
        for label, value in re.findall(r'(\w+)[=~!]+"([^"]*)"', selector):
            assert f"`{label}`" in row, f"{family} has no label {label}"
            if label == "code":
                assert {one for one in value.split("|") if one != "5.."} <= codes


def test_prometheus_reads_the_port_of_the_metrics() -> None:
    config = yaml.safe_load((PROMETHEUS / "prometheus.yaml").read_text())
    (job,) = config["scrape_configs"]
    (source,) = job["dns_sd_configs"]
    assert source["port"] == ports_of("hypercast-gateway")["metrics"]
    assert source["names"] == ["hypercast-gateway-metrics.hypercast.svc.cluster.local"]
    assert set(config["rule_files"]) == {"alerts.yaml", "alerts-kubernetes.yaml"}
    assert all('job="hypercast-gateway"' in rule["expr"] for rule in EVERY if "up{" in rule["expr"])
    assert job["job_name"] == "hypercast-gateway"
