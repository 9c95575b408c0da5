"""The Kubernetes manifests: valid by the API's schemas, consistent with each other and with the programs."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from gateway.api.operations import OPERATIONS
from gateway.core.settings import parse as parse_gateway
from invoker.settings import parse_settings as parse_invoker
from registry.config.secrets import parse_key

FOLDER = Path(__file__).resolve().parents[2] / "deploy" / "kubernetes"
NAMESPACE = "hypercast"

Object = dict[str, Any]


def documents() -> list[tuple[str, Object]]:
    return [
        (path.name, document)
        for path in sorted(FOLDER.glob("*.yaml"))
        if path.name != "kustomization.yaml"
        for document in yaml.safe_load_all(path.read_text())
    ]


def objects(kind: str) -> dict[str, Object]:
    return {d["metadata"]["name"]: d for _, d in documents() if d["kind"] == kind}


def workloads() -> list[Object]:
    return [d for _, d in documents() if d["kind"] in ("Deployment", "DaemonSet", "StatefulSet")]


def containers() -> Iterator[tuple[Object, Object, Object]]:
    """(workload, pod spec, container) for every container."""
    for workload in workloads():
        pod = workload["spec"]["template"]["spec"]
        for container in pod["containers"]:
            yield workload, pod, container


IDS = [f"{name}:{d['kind']}/{d['metadata']['name']}" for name, d in documents()]


@pytest.mark.parametrize("document", [d for _, d in documents()], ids=IDS)
@pytest.mark.parametrize("version", ["1.30", "1.34", kubernetes_validate.latest_version()])
def test_manifests_are_valid(document: Object, version: str) -> None:
    kubernetes_validate.validate(document, version, strict=True)


def test_everything_that_is_needed_is_there() -> None:
    kinds = sorted((d["kind"], d["metadata"]["name"]) for _, d in documents())
    assert kinds == [
        ("DaemonSet", "hypercast-invoker"),
        ("Deployment", "hypercast-gateway"),
        ("Namespace", "hypercast"),
        ("NetworkPolicy", "hypercast-invoker"),
        ("NetworkPolicy", "redis"),
        ("PersistentVolumeClaim", "hypercast-store"),
        ("PodDisruptionBudget", "hypercast-gateway"),
        ("Secret", "hypercast-cluster"),
        ("Service", "hypercast-gateway"),
        ("Service", "redis"),
        ("StatefulSet", "redis"),
    ]


def test_kustomization_lists_every_file_but_the_secrets_template() -> None:
    kustomization = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())
    assert kustomization["namespace"] == NAMESPACE
    files = {path.name for path in FOLDER.glob("*.yaml")}
    assert set(kustomization["resources"]) == files - {"kustomization.yaml", "secret.template.yaml"}
    names = {container["image"].partition(":")[0] for _, _, container in containers()}
    assert {image["name"] for image in kustomization["images"]} <= names


def test_namespaces_agree() -> None:
    for _, document in documents():
        if document["kind"] == "Namespace":
            assert document["metadata"]["name"] == NAMESPACE
        else:
            assert document["metadata"]["namespace"] == NAMESPACE
        assert document["metadata"]["labels"]["app.kubernetes.io/part-of"] == "hypercast"


def test_selectors_match_their_pods() -> None:
    labels = {w["metadata"]["name"]: w["spec"]["template"]["metadata"]["labels"] for w in workloads()}
    for workload in workloads():
        assert (
            workload["spec"]["selector"]["matchLabels"].items()
            <= labels[workload["metadata"]["name"]].items()
        )
    selectors = [(d["metadata"]["name"], d["spec"]["selector"]) for d in objects("Service").values()]
    selectors += [
        (d["metadata"]["name"], d["spec"]["selector"]["matchLabels"])
        for d in objects("PodDisruptionBudget").values()
    ]
    selectors += [
        (d["metadata"]["name"], d["spec"]["podSelector"]["matchLabels"])
        for d in objects("NetworkPolicy").values()
    ]
    for name, selector in selectors:
        matched = [found for found, given in labels.items() if selector.items() <= given.items()]
        assert matched == [name], f"{name} selects {matched}"


def ports_of(name: str) -> dict[str, int]:
    (container,) = (c for w, _, c in containers() if w["metadata"]["name"] == name)
    return {port["name"]: port["containerPort"] for port in container["ports"]}


def test_ports_exist_where_they_are_named() -> None:
    for service in objects("Service").values():
        for port in service["spec"]["ports"]:
            assert port["targetPort"] in ports_of(service["metadata"]["name"])
    for policy in objects("NetworkPolicy").values():
        for rule in policy["spec"]["ingress"]:
            for port in rule["ports"]:
                assert port["port"] in ports_of(policy["metadata"]["name"])
    for workload, _, container in containers():
        ports = ports_of(workload["metadata"]["name"])
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            how = container[probe]
            action = how.get("httpGet") or how.get("tcpSocket")
            if action is not None:
                assert action["port"] in ports
            else:
                assert how["exec"]["command"]


def test_probes_ask_what_the_gateway_serves() -> None:
    (container,) = (c for w, _, c in containers() if w["metadata"]["name"] == "hypercast-gateway")
    assert container["livenessProbe"]["httpGet"]["path"] == "/livez"
    assert container["startupProbe"]["httpGet"]["path"] == "/livez"
    assert container["readinessProbe"]["httpGet"]["path"] == "/readyz"
    served = {operation.path for operation in OPERATIONS}
    assert {"/livez", "/readyz", "/metrics"} <= served


def test_volumes_claims_and_secrets_exist() -> None:
    template = objects("Secret")["hypercast-cluster"]["stringData"]
    claims = set(objects("PersistentVolumeClaim"))
    for workload, pod, container in containers():
        own = {claim["metadata"]["name"] for claim in workload["spec"].get("volumeClaimTemplates", [])}
        volumes = {volume["name"]: volume for volume in pod.get("volumes", [])}
        assert {mount["name"] for mount in container["volumeMounts"]} == set(volumes) | own
        for volume in volumes.values():
            if "secret" in volume:
                assert volume["secret"]["secretName"] == "hypercast-cluster"
                assert {item["key"] for item in volume["secret"].get("items", [])} <= set(template)
            if "persistentVolumeClaim" in volume:
                assert volume["persistentVolumeClaim"]["claimName"] in claims
    assert not any(template.values()), "a template holds no secret"


def test_the_admin_key_of_the_instructions_is_one() -> None:
    text = (FOLDER / "kustomization.yaml").read_text()
    assert "hc_$(openssl rand -hex 8)_$(openssl rand -hex 32)" in text
    assert parse_key(f"hc_{'0f' * 8}_{'0f' * 32}").id == "0f" * 8


def test_containers_are_locked_down() -> None:
    for _, pod, container in containers():
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["runAsUser"] > 0
        assert pod["securityContext"]["seccompProfile"]["type"] == "RuntimeDefault"
        assert pod["automountServiceAccountToken"] is False
        security = container["securityContext"]
        assert security["allowPrivilegeEscalation"] is False
        assert security["readOnlyRootFilesystem"] is True
        assert security["capabilities"]["drop"] == ["ALL"]
        assert container["resources"]["requests"] and container["resources"]["limits"]["memory"]
        tag = container["image"].partition(":")[2]
        assert tag and tag != "latest"
        assert "/" not in container["image"], "the image's registry is the operator's choice"


def arguments(container: Object) -> list[str]:
    """Return the arguments with $(NAME) filled in; every name must be defined."""
    defined = {entry["name"] for entry in container.get("env", [])}

    def fill(match: re.Match[str]) -> str:
        assert match[1] in defined, f"{match[0]} is not defined"
        return "10.1.2.3" if match[1].endswith("IP") else "machine-1"

    return [re.sub(r"\$\((\w+)\)", fill, argument) for argument in container["args"]]


def test_the_gateway_understands_its_arguments(tmp_path: Path) -> None:
    (workload, pod, container) = next(c for c in containers() if c[2]["name"] == "gateway")
    program, *flags = arguments(container)
    assert program == "gateway"
    settings = parse_gateway(with_secret(flags, tmp_path), {})
    assert settings.host == "0.0.0.0"
    assert settings.port in ports_of(workload["metadata"]["name"]).values()
    assert settings.redis_url == "redis://redis:6379/0"
    assert_mounted(container, settings.store)
    assert str(settings.admin_key_file) == "/etc/hypercast/admin.key"
    assert_time_to_leave(pod, container, settings.grace_s)


def test_the_invoker_understands_its_arguments(tmp_path: Path) -> None:
    (workload, pod, container) = next(c for c in containers() if c[2]["name"] == "invoker")
    program, *flags = arguments(container)
    assert program == "invoker"
    settings = parse_invoker(with_secret(flags, tmp_path), {})
    ports = ports_of(workload["metadata"]["name"])
    found = settings.listen_port, settings.cast_port, settings.stage_port
    assert found == (ports["channel"], ports["cast"], ports["stage"])
    assert settings.listen_host == "0.0.0.0" and settings.advertise == "10.1.2.3"
    assert settings.device == "cuda:0"
    assert_mounted(container, settings.store_url)
    assert_time_to_leave(pod, container, settings.grace_s)
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert pod["nodeSelector"] == {"nvidia.com/gpu.present": "true"}
    (shm,) = (v for v in pod["volumes"] if v["name"] == "shm")
    assert shm["emptyDir"]["medium"] == "Memory"
    assert gibibytes(shm["emptyDir"]["sizeLimit"]) == (settings.host_memory_bytes or 0) / 1024**3
    assert gibibytes(container["resources"]["limits"]["memory"]) > gibibytes(shm["emptyDir"]["sizeLimit"])
    assert_mounted(container, str(settings.shm_dir))


def test_redis_keeps_its_data() -> None:
    (container,) = (c for _, _, c in containers() if c["name"] == "redis")
    args = container["args"]
    assert args[args.index("--appendonly") + 1] == "yes"
    assert args[args.index("--maxmemory-policy") + 1] == "noeviction"
    limit = container["resources"]["limits"]["memory"]
    assert limit == "2Gi" and args[args.index("--maxmemory") + 1] == "1400mb"
    data = args[args.index("--dir") + 1]
    assert_mounted(container, data)
    assert objects("StatefulSet")["redis"]["spec"]["serviceName"] in objects("Service")


def with_secret(flags: list[str], tmp_path: Path) -> list[str]:
    """Return the flags with the mounted secret file replaced by one that is there."""
    secret = tmp_path / "cluster.secret"
    secret.write_text("0" * 64)
    replaced = [f"--secret-file={secret}" if flag.startswith("--secret-file=") else flag for flag in flags]
    assert replaced != flags
    return replaced


def assert_mounted(container: Object, path: str | None) -> None:
    assert path in {mount["mountPath"] for mount in container["volumeMounts"]}


def assert_time_to_leave(pod: Object, container: Object, grace_s: float) -> None:
    wait_s = float(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] > wait_s + grace_s


def gibibytes(text: str) -> float:
    assert text.endswith("Gi")
    return float(text.removesuffix("Gi"))
