"""The Kubernetes manifests: valid by the API's schemas, and consistent with each other."""

import shutil
import subprocess
from pathlib import Path

import jsonschema
import kubernetes_validate
import pytest
import yaml

from gateway.api.operations import OPERATIONS
from gateway.core.node_demand import NodePool
from tests.fixtures.cert_manager import CERT_MANAGER
from tests.fixtures.keda import SCALED_OBJECT
from tests.fixtures.manifests import (
    FOLDER,
    NAMESPACE,
    SCRIPTS,
    Object,
    components,
    container,
    containers,
    documents,
    objects,
    ports_of,
    selected,
    template,
    workloads,
)

BY_HAND = {"kustomization.yaml", "secret.template.yaml", "restore.yaml"}
EVERY = [(name, d) for folder in (FOLDER, *components()) for name, d in documents(folder)]
IDS = [f"{name}:{d['kind']}/{d['metadata'].get('name', '')}" for name, d in EVERY]


@pytest.mark.parametrize("document", [d for _, d in EVERY], ids=IDS)
@pytest.mark.parametrize("version", ["1.30", kubernetes_validate.latest_version()])
def test_manifests_are_valid(document: Object, version: str) -> None:
    if document["apiVersion"] == "cert-manager.io/v1":
        jsonschema.Draft202012Validator(CERT_MANAGER[document["kind"]]).validate(document["spec"])
        return
    if document["apiVersion"] == "keda.sh/v1alpha1":
        jsonschema.Draft202012Validator(SCALED_OBJECT).validate(document["spec"])
        return
    kubernetes_validate.validate(document, version, strict=True)


def test_everything_that_is_needed_is_there() -> None:
    kinds = sorted((d["kind"], d["metadata"].get("name", "")) for _, d in documents())
    assert kinds == [
        ("Certificate", "hypercast-ca"),
        ("Certificate", "hypercast-gateway"),
        ("Certificate", "hypercast-node"),
        ("Certificate", "redis"),
        ("CronJob", "redis-backup"),
        ("DaemonSet", "hypercast-handlers"),
        ("DaemonSet", "hypercast-invoker"),
        ("Deployment", "hypercast-gateway"),
        ("Issuer", "hypercast-ca"),
        ("Issuer", "hypercast-self-signed"),
        ("Job", ""),
        ("Namespace", "hypercast"),
        ("NetworkPolicy", "default-deny"),
        ("NetworkPolicy", "dns"),
        ("NetworkPolicy", "hypercast-gateway"),
        ("NetworkPolicy", "hypercast-handlers"),
        ("NetworkPolicy", "hypercast-invoker"),
        ("NetworkPolicy", "redis"),
        ("NetworkPolicy", "redis-backup"),
        ("PersistentVolumeClaim", "hypercast-store"),
        ("PersistentVolumeClaim", "redis-backups"),
        ("PodDisruptionBudget", "hypercast-gateway"),
        ("PodDisruptionBudget", "redis"),
        ("Secret", "hypercast-cluster"),
        ("Secret", "redis-passwords"),
        ("Service", "hypercast-gateway"),
        ("Service", "hypercast-gateway-metrics"),
        ("Service", "redis"),
        ("StatefulSet", "redis"),
    ]


def test_kustomization_lists_every_file_but_those_made_by_hand() -> None:
    kustomization = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())
    assert kustomization["namespace"] == NAMESPACE
    files = {path.name for path in FOLDER.glob("*.yaml")} - BY_HAND
    assert set(kustomization["resources"]) == {*files, "../redis"}
    names = {one.spec["image"].partition(":")[0] for one in containers()}
    assert {image["name"] for image in kustomization["images"]} <= names
    listed = (FOLDER / "kustomization.yaml").read_text()
    assert all(f"#  - components/{path.name}\n" in listed for path in components())
    (scripts,) = yaml.safe_load((SCRIPTS / "kustomization.yaml").read_text())["configMapGenerator"]
    assert set(scripts["files"]) == {path.name for path in SCRIPTS.glob("*.sh")}


def rendered(folder: Path) -> list[Object]:
    """Return what kustomize makes of a folder."""
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("needs kubectl")
    made = subprocess.run([kubectl, "kustomize", folder], capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    return list(yaml.safe_load_all(made.stdout))


def test_kustomize_builds_everything_with_its_optional_parts(tmp_path: Path) -> None:
    plain = rendered(FOLDER)
    shutil.copytree(FOLDER.parent, tmp_path / "deploy")
    file = tmp_path / "deploy" / "kubernetes" / "kustomization.yaml"
    text = (
        file.read_text().replace("components: []", "components:").replace("#  - components", "  - components")
    )
    file.write_text(text)
    made = rendered(file.parent)
    assert len(made) == len(plain) + 3
    (scripts,) = (d for d in made if d["kind"] == "ConfigMap")
    assert scripts["metadata"]["name"] == "redis-scripts" and "start.sh" in scripts["data"]
    (handlers,) = (
        d for d in made if d["metadata"]["name"] == "hypercast-handlers" and d["kind"] == "DaemonSet"
    )
    pod = template(handlers)["spec"]
    assert pod["runtimeClassName"] == "kata"
    assert "--handler-network" in pod["containers"][0]["args"]


def test_keda_gives_the_nodes_for_models_as_many_pods_as_are_wanted(tmp_path: Path) -> None:
    shutil.copytree(FOLDER.parent, tmp_path / "deploy")
    file = tmp_path / "deploy" / "kubernetes" / "kustomization.yaml"
    file.write_text(file.read_text().replace("components: []", "components: [components/autoscaling]"))
    made = {(d["kind"], d["metadata"]["name"]): d for d in rendered(file.parent)}
    assert ("DaemonSet", "hypercast-invoker") not in made
    nodes, scaled = made["Deployment", "hypercast-invoker"], made["ScaledObject", "hypercast-invoker"]
    kubernetes_validate.validate(nodes, kubernetes_validate.latest_version(), strict=True)
    assert "replicas" not in nodes["spec"]  # KEDA's, also after a further apply
    target = scaled["spec"]["scaleTargetRef"]
    assert (target["kind"], target["name"]) == ("Deployment", nodes["metadata"]["name"])
    (trigger,) = scaled["spec"]["triggers"]
    (pod,) = template(nodes)["spec"]["containers"]
    pool = NodePool(pod["resources"]["limits"]["nvidia.com/gpu"], "--allow-handlers" in pod["args"])
    labels = f'{{handlers="{str(pool.handlers).lower()}",gpus="{pool.gpus}"}}'
    assert trigger["metadata"]["query"] == f"max(hypercast_nodes_wanted{labels})"
    before = container("hypercast-invoker").spec["args"]
    assert set(pod["args"]) ^ set(before) == {"--grace=60s", "--grace=10m"}
    assert template(nodes)["spec"]["terminationGracePeriodSeconds"] > 10 * 60


def test_namespaces_agree() -> None:
    for _, document in EVERY:
        if document["kind"] == "Namespace":
            assert document["metadata"]["name"] == NAMESPACE
        else:
            assert document["metadata"]["namespace"] == NAMESPACE
        assert document["metadata"]["labels"]["app.kubernetes.io/part-of"] == "hypercast"


def test_selectors_match_their_pods() -> None:
    for workload in workloads():
        labels = template(workload)["metadata"]["labels"]
        assert workload["metadata"].get("name", "redis-restore") == labels["app.kubernetes.io/name"]
        if workload["kind"] not in ("CronJob", "Job"):
            assert workload["spec"]["selector"]["matchLabels"].items() <= labels.items()
    for name, service in objects("Service").items():
        chosen = selected({"matchLabels": service["spec"]["selector"]})
        assert chosen == {name.removesuffix("-metrics")}


def test_disruption_budgets_hold_what_has_no_daemon_set() -> None:
    budgets = objects("PodDisruptionBudget")
    for name, budget in budgets.items():
        assert selected(budget["spec"]["selector"]) == {name}
        assert budget["spec"]["minAvailable"] >= 1
    kinds = ("Deployment", "StatefulSet")
    assert set(budgets) == {w["metadata"]["name"] for w in workloads() if w["kind"] in kinds}
    assert objects("Deployment")["hypercast-gateway"]["spec"]["replicas"] > 1


def test_ports_exist_where_they_are_named() -> None:
    for service in objects("Service").values():
        for port in service["spec"]["ports"]:
            assert port["targetPort"] in ports_of(service["spec"]["selector"]["app.kubernetes.io/name"])
    for one in containers():
        ports = one.spec.get("ports", [])
        for probe in ("startupProbe", "livenessProbe", "readinessProbe") if ports else ():
            how = one.spec[probe]
            action = how.get("httpGet") or how.get("tcpSocket")
            if action is not None:
                assert action["port"] in {port["name"] for port in ports}
            else:
                script = "ready" if probe == "readinessProbe" else "alive"
                ask = ["sh", f"/scripts/{script}.sh", "/run/secrets/redis", "--tls", "--cacert"]
                assert how["exec"]["command"] == [*ask, "/run/secrets/redis/ca.crt"]


def test_probes_ask_what_the_gateway_serves() -> None:
    gateway = container("hypercast-gateway").spec
    for probe, path in (("startup", "/livez"), ("liveness", "/livez"), ("readiness", "/readyz")):
        assert gateway[f"{probe}Probe"]["httpGet"] == {"path": path, "port": "https", "scheme": "HTTPS"}
    served = {operation.path for operation in OPERATIONS}
    assert {"/livez", "/readyz", "/metrics"} <= served
    annotations = template(objects("Deployment")["hypercast-gateway"])["metadata"]["annotations"]
    assert int(annotations["prometheus.io/port"]) == ports_of("hypercast-gateway")["metrics"]


def secrets_of(volume: Object) -> list[Object]:
    """Return the Secrets of a volume as {name, items}."""
    if "secret" in volume:
        return [{**volume["secret"], "name": volume["secret"]["secretName"]}]
    sources = volume.get("projected", {}).get("sources", [])
    return [source["secret"] for source in sources]


def test_volumes_claims_and_secrets_exist() -> None:
    templates = {name: secret["stringData"] for name, secret in objects("Secret").items()}
    certificates = {c["spec"]["secretName"] for c in objects("Certificate").values()}
    templates |= {name: dict.fromkeys(("tls.crt", "tls.key", "ca.crt"), "") for name in certificates}
    claims = set(objects("PersistentVolumeClaim")) | {"data-redis-0"}  # of the StatefulSet's template
    for one in containers():
        own = {claim["metadata"]["name"] for claim in one.workload["spec"].get("volumeClaimTemplates", [])}
        volumes = {volume["name"]: volume for volume in one.pod["volumes"]}
        assert {mount["name"] for mount in one.spec["volumeMounts"]} == set(volumes) | own
        for volume in volumes.values():
            for secret in secrets_of(volume):
                assert {item["key"] for item in secret.get("items", [])} <= set(templates[secret["name"]])
            if "persistentVolumeClaim" in volume:
                assert volume["persistentVolumeClaim"]["claimName"] in claims
            assert volume.get("configMap", {"name": "redis-scripts"})["name"] == "redis-scripts"
    assert not any(value for values in templates.values() for value in values.values())


def test_pods_get_only_the_secrets_that_they_need() -> None:
    got: dict[str, set[str]] = {}
    for one in containers():
        for volume in one.pod["volumes"]:
            for secret in secrets_of(volume):
                given = (f"{secret['name']}/{item['key']}" for item in secret.get("items", [{"key": "*"}]))
                keys = {key.removeprefix("hypercast-") for key in given}
                got.setdefault(one.of, set()).update(keys)
    node = {"node-tls/tls.crt", "node-tls/tls.key", "node-tls/ca.crt", "redis-passwords/redis_password"}
    assert got == {
        "hypercast-gateway": {*node, "cluster/*", "gateway-tls/tls.crt", "gateway-tls/tls.key"},
        "hypercast-invoker": {*node, "cluster/cluster.secret"},
        "hypercast-handlers": {*node, "cluster/cluster.secret"},
        "redis": {"redis-passwords/*", "redis-tls/*"},
        "redis-backup": {"redis-passwords/backup_password", "redis-tls/ca.crt"},
    }
