"""The Kubernetes manifests: valid by the API's schemas, and consistent with each other."""

import re
import shutil
from pathlib import Path

import jsonschema
import kubernetes_validate
import pytest
import yaml

from gateway.api.operations import OPERATIONS
from gateway.core.node_demand import NodePool
from invoker.settings import parse_settings as parse_invoker
from tests.fixtures.cert_manager import CERT_MANAGER
from tests.fixtures.keda import SCALED_OBJECT
from tests.fixtures.manifests import (
    FOLDER,
    KUBERNETES,
    NAMESPACE,
    OVERLAYS,
    SCRIPTS,
    Object,
    components,
    container,
    containers,
    documents,
    nbytes,
    objects,
    ports_of,
    render,
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
    assert set(kustomization["resources"]) == {*files, "../../redis"}
    names = {one.spec["image"].partition(":")[0] for one in containers()}
    assert {image["name"] for image in kustomization["images"]} <= names
    for overlay in ("cpu", "gpu"):
        listed = (KUBERNETES / "overlays" / overlay / "kustomization.yaml").read_text()
        parts = {path.name for path in components()} - ({"autoscaling"} if overlay == "cpu" else set())
        assert set(re.findall(r"#  - \.\./\.\./components/(\S+)\n", listed)) == parts
    (scripts,) = yaml.safe_load((SCRIPTS / "kustomization.yaml").read_text())["configMapGenerator"]
    assert set(scripts["files"]) == {path.name for path in SCRIPTS.glob("*.sh")}


def uncomment(overlay: Path, part: str) -> None:
    """Add the optional parts of an overlay whose path begins so."""
    file = overlay / "kustomization.yaml"
    text = file.read_text().replace("components: []", "components:")
    file.write_text(text.replace(f"#  - {part}", f"  - {part}"))


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_kustomize_builds_everything_with_its_optional_parts(overlay: str, tmp_path: Path) -> None:
    plain = render(KUBERNETES / "overlays" / overlay)
    for document in plain:
        if document["apiVersion"] != "cert-manager.io/v1":
            kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)
    shutil.copytree(KUBERNETES.parent, tmp_path / "deploy")
    overlays = tmp_path / "deploy" / "kubernetes" / "overlays"
    for name in ("cpu", "gpu"):
        uncomment(overlays / name, "../../components")
    made = render(overlays / overlay)
    assert len(made) == len(plain) + (2 if overlay == "cpu" else 3)
    (scripts,) = (d for d in made if d["kind"] == "ConfigMap")
    assert scripts["metadata"]["name"] == "redis-scripts" and "start.sh" in scripts["data"]
    pod = template(named(made, "hypercast-handlers"))["spec"]
    assert pod["runtimeClassName"] == "kata"
    assert "--handler-network" in pod["containers"][0]["args"]


def named(made: list[Object], name: str) -> Object:
    """Return the DaemonSet of a name."""
    (found,) = (d for d in made if d["kind"] == "DaemonSet" and d["metadata"]["name"] == name)
    return found


@pytest.mark.parametrize(
    ("overlay", "arguments", "limits", "where"),
    [
        ("cpu", {"--device=cpu", "--gpu-memory=8GiB"}, {}, {"hypercast/pool": "models"}),
        ("gpu", {"--device=cuda:0"}, {"nvidia.com/gpu": 1}, {"nvidia.com/gpu.present": "true"}),
        (
            "rdma",
            {"--device=cuda:0", "--require-rdma"},
            {"nvidia.com/gpu": 1, "rdma/hca": 1},
            {"nvidia.com/gpu.present": "true"},
        ),
    ],
)
def test_overlays_change_the_nodes_of_models_alone(
    overlay: str, arguments: set[str], limits: dict[str, int], where: dict[str, str]
) -> None:
    base, made = render(FOLDER), render(KUBERNETES / "overlays" / overlay)
    name = "hypercast-invoker"
    assert [d for d in base if d != named(base, name)] == [d for d in made if d != named(made, name)]
    before, after = (template(named(one, name))["spec"] for one in (base, made))
    assert after["nodeSelector"] == where and "nodeSelector" not in before
    (old,), (new,) = before["containers"], after["containers"]
    assert set(new["args"]) == {*old["args"], *arguments} and not arguments & set(old["args"])
    assert new["resources"]["limits"] == {**old["resources"]["limits"], **limits}
    filled = [flag for flag in new["args"][1:] if not re.search(r"\$\(|/etc/hypercast", flag)]
    settings = parse_invoker(
        [*filled, "--node-id=a", "--host-id=a", "--advertise=a"], {"HYPERCAST_CLUSTER_SECRET": "0" * 64}
    )
    # The host tier, the arena of a processor and 4 GiB for the process.
    arena = settings.gpu_memory_bytes if settings.device == "cpu" else 0
    used = settings.host_memory_bytes + (arena or 0) + (4 << 30)
    assert used <= nbytes(new["resources"]["limits"]["memory"])


@pytest.mark.parametrize("overlay", ["gpu", "rdma"])
def test_keda_gives_the_nodes_for_models_as_many_pods_as_are_wanted(overlay: str, tmp_path: Path) -> None:
    shutil.copytree(KUBERNETES.parent, tmp_path / "deploy")
    overlays = tmp_path / "deploy" / "kubernetes" / "overlays"
    plain = named(render(overlays / overlay), "hypercast-invoker")
    uncomment(overlays / "gpu", "../../components/autoscaling")
    made = {(d["kind"], d["metadata"]["name"]): d for d in render(overlays / overlay)}
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
    (before,) = template(plain)["spec"]["containers"]
    assert pod["resources"] == before["resources"]
    assert set(pod["args"]) ^ set(before["args"]) == {"--grace=60s", "--grace=10m"}
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
