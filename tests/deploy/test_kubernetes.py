"""The Kubernetes manifests: valid by the API's schemas, consistent with each other and with the programs."""

import base64
import re
import shutil
import subprocess
from pathlib import Path

import jsonschema
import kubernetes_validate
import pytest
import yaml

from gateway.api.operations import OPERATIONS
from gateway.core.settings import parse as parse_gateway
from invoker.handlers.confine import CEILINGS
from invoker.settings import parse_settings as parse_invoker
from registry.config.function_yaml import parse_handler_limits
from registry.config.secrets import parse_key
from tests.fixtures.manifests import (
    FOLDER,
    NAMESPACE,
    SCRIPTS,
    Container,
    Object,
    arguments,
    components,
    container,
    containers,
    documents,
    nbytes,
    objects,
    pods,
    ports_of,
    selected,
    template,
    workloads,
)

BY_HAND = {"kustomization.yaml", "secret.template.yaml", "restore.yaml"}
POOLS = {"hypercast-invoker", "hypercast-handlers"}
EVERY = [(name, d) for folder in (FOLDER, *components()) for name, d in documents(folder)]
IDS = [f"{name}:{d['kind']}/{d['metadata'].get('name', '')}" for name, d in EVERY]


_TEXT = {"type": "string", "minLength": 1}
_HOURS = {"type": "string", "pattern": "^[1-9][0-9]*h$"}


def _object(*required: str, **properties: object) -> Object:
    return {"properties": properties, "required": required, "additionalProperties": False}


# The part of cert-manager's resources that the manifests use.
CERT_MANAGER = {
    "Issuer": {
        **_object(selfSigned=_object(), ca=_object("secretName", secretName=_TEXT)),
        "minProperties": 1,
        "maxProperties": 1,
    },
    "Certificate": _object(
        *("secretName", "issuerRef", "commonName", "duration", "privateKey"),
        isCA={"type": "boolean"},
        secretName=_TEXT,
        issuerRef=_object("kind", "name", kind={"const": "Issuer"}, name=_TEXT),
        commonName=_TEXT,
        dnsNames={"type": "array", "items": _TEXT, "minItems": 1},
        usages={"items": {"enum": ["digital signature", "server auth", "client auth"]}},
        duration=_HOURS,
        renewBefore=_HOURS,
        privateKey=_object(
            algorithm={"const": "ECDSA"}, size={"const": 256}, rotationPolicy={"const": "Always"}
        ),
    ),
}


@pytest.mark.parametrize("document", [d for _, d in EVERY], ids=IDS)
@pytest.mark.parametrize("version", ["1.30", kubernetes_validate.latest_version()])
def test_manifests_are_valid(document: Object, version: str) -> None:
    if document["apiVersion"] == "cert-manager.io/v1":
        jsonschema.Draft202012Validator(CERT_MANAGER[document["kind"]]).validate(document["spec"])
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
    assert len(made) == len(plain) + 2
    (scripts,) = (d for d in made if d["kind"] == "ConfigMap")
    assert scripts["metadata"]["name"] == "redis-scripts" and "start.sh" in scripts["data"]
    (handlers,) = (
        d for d in made if d["metadata"]["name"] == "hypercast-handlers" and d["kind"] == "DaemonSet"
    )
    pod = template(handlers)["spec"]
    assert pod["runtimeClassName"] == "kata"
    assert "--handler-network" in pod["containers"][0]["args"]


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


@pytest.fixture(scope="module")
def etc(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder like /etc/hypercast, with what certificates.sh makes in `made`."""
    folder = tmp_path_factory.mktemp("etc")
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl")
    made = subprocess.run(
        ["sh", FOLDER / "certificates.sh", folder / "made"], capture_output=True, text=True, check=False
    )
    assert made.returncode == 0, made.stderr
    (folder / "tls").mkdir()
    for name in ("cluster.secret", "redis.password", "admin.key"):
        (folder / name).write_text("0" * 64)
    shutil.copy(folder / "made" / "ca.crt", folder / "tls" / "ca.crt")
    for name, secret in (("http", "hypercast-gateway-tls"), ("node", "hypercast-node-tls")):
        for kind in ("crt", "key"):
            shutil.copy(folder / "made" / f"{secret}.{kind}", folder / "tls" / f"{name}.{kind}")
    return folder


def at(flags: list[str], etc: Path) -> list[str]:
    """Return the flags with the mounted files replaced by ones that are there."""
    return [flag.replace("=/etc/hypercast/", f"={etc}/") for flag in flags]


def openssl(*arguments: object) -> str:
    return subprocess.run(
        ["openssl", *map(str, arguments)], capture_output=True, text=True, check=True
    ).stdout


def test_the_recipe_makes_what_cert_manager_makes(etc: Path) -> None:
    certificates = {c["spec"]["secretName"]: c["spec"] for c in objects("Certificate").values()}
    secrets = {
        secret["metadata"]["name"]: secret
        for secret in yaml.safe_load_all((etc / "made" / "secrets.yaml").read_text())
        if secret is not None
    }
    assert set(secrets) == set(certificates) - {"hypercast-ca"}
    for name, secret in secrets.items():
        kubernetes_validate.validate(secret, kubernetes_validate.latest_version(), strict=True)
        assert secret["metadata"]["namespace"] == NAMESPACE
        for key, file in (("tls.crt", f"{name}.crt"), ("tls.key", f"{name}.key"), ("ca.crt", "ca.crt")):
            assert base64.b64decode(secret["data"][key]) == (etc / "made" / file).read_bytes()
        verified = openssl("verify", "-CAfile", etc / "made" / "ca.crt", etc / "made" / f"{name}.crt")
        assert verified.endswith(": OK\n")
        shown = openssl(
            *("x509", "-noout", "-ext", "subjectAltName,extendedKeyUsage"),
            *("-in", etc / "made" / f"{name}.crt"),
        )
        wanted = certificates[name]
        assert re.findall(r"DNS:([\w.-]+)", shown) == wanted["dnsNames"]
        for usage, text in (("server auth", "TLS Web Server"), ("client auth", "TLS Web Client")):
            assert (usage in wanted["usages"]) == (text in shown)
    for service in ("redis", "hypercast-gateway"):
        assert f"{service}.{NAMESPACE}.svc" in objects("Certificate")[service]["spec"]["dnsNames"]


def test_the_admin_key_of_the_instructions_is_one() -> None:
    text = (FOLDER / "kustomization.yaml").read_text()
    assert "hc_$(openssl rand -hex 8)_$(openssl rand -hex 32)" in text
    assert parse_key(f"hc_{'0f' * 8}_{'0f' * 32}").id == "0f" * 8


def test_containers_are_locked_down() -> None:
    for one in containers():
        assert one.pod["securityContext"]["runAsNonRoot"] is True
        assert one.pod["securityContext"]["runAsUser"] > 0
        assert one.pod["securityContext"]["seccompProfile"]["type"] == "RuntimeDefault"
        assert one.pod["automountServiceAccountToken"] is False
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(one.pod)
        security = one.spec["securityContext"]
        assert security["allowPrivilegeEscalation"] is False
        assert security["readOnlyRootFilesystem"] is True
        assert security["capabilities"]["drop"] == ["ALL"]
        tag = one.spec["image"].partition(":")[2]
        assert tag and tag != "latest"
        assert "/" not in one.spec["image"], "the image's registry is the operator's choice"


@pytest.mark.parametrize("name", sorted(pods()))
def test_a_container_can_neither_fill_the_memory_nor_the_disk_of_its_machine(name: str) -> None:
    one = container(name)
    requests, limits = one.spec["resources"]["requests"], one.spec["resources"]["limits"]
    assert set(requests) == {"cpu", "memory", "ephemeral-storage"}
    assert set(limits) >= {"memory", "ephemeral-storage"}
    folders = [volume["emptyDir"] for volume in one.pod["volumes"] if "emptyDir" in volume]
    for what, medium in (("memory", "Memory"), ("ephemeral-storage", "")):
        assert nbytes(requests[what]) <= nbytes(limits[what])
        sizes = [nbytes(folder["sizeLimit"]) for folder in folders if folder.get("medium", "") == medium]
        assert sum(sizes) < nbytes(limits[what])


def test_the_gateway_understands_its_arguments(etc: Path) -> None:
    one = container("hypercast-gateway")
    program, *flags = arguments(one)
    assert program == "gateway"
    settings = parse_gateway(at(flags, etc), {})
    assert settings.host == "0.0.0.0"
    ports = ports_of("hypercast-gateway")
    assert (settings.port, settings.metrics_port) == (ports["https"], ports["metrics"])
    assert settings.redis_url == "rediss://redis:6379/0" and settings.redis_password == "0" * 64
    assert all((settings.tls.http, settings.tls.channel, settings.tls.redis))
    assert_mounted(one, settings.store)
    assert settings.admin_key_file == etc / "admin.key"
    assert_time_to_leave(one, settings.grace_s)


@pytest.mark.parametrize("name", sorted(POOLS))
def test_an_invoker_understands_its_arguments(name: str, etc: Path) -> None:
    one = container(name)
    program, *flags = arguments(one)
    assert program == "invoker" and "--allow-unconfined-handlers" not in flags
    # Whether this machine can confine handlers is not the question here.
    settings = parse_invoker([*at(flags, etc), "--allow-unconfined-handlers"], {})
    assert all((settings.tls.channel, settings.tls.cast, settings.tls.redis))
    ports = ports_of(name)
    assert (settings.listen_port, settings.cast_port) == (ports["channel"], ports["cast"])
    assert settings.stage_port == ports.get("stage", 0)
    assert settings.listen_host == "0.0.0.0" and settings.advertise == "10.1.2.3"
    assert_mounted(one, settings.store_url)
    assert_time_to_leave(one, settings.grace_s)
    (shm,) = (v for v in one.pod["volumes"] if v["name"] == "shm")
    assert shm["emptyDir"]["medium"] == "Memory"
    assert nbytes(shm["emptyDir"]["sizeLimit"]) == settings.host_memory_bytes
    assert_mounted(one, str(settings.shm_dir))


def test_handlers_run_on_machines_of_their_own() -> None:
    models, handlers = container("hypercast-invoker"), container("hypercast-handlers")
    assert not any("handler" in flag for flag in models.spec["args"])
    assert "--allow-handlers" in handlers.spec["args"]
    assert models.pod["nodeSelector"] == {"nvidia.com/gpu.present": "true"}
    assert (
        models.spec["resources"]["limits"]["nvidia.com/gpu"] == 1 and "--device=cuda:0" in models.spec["args"]
    )
    (pool,) = handlers.pod["nodeSelector"].items()
    (taint,) = handlers.pod["tolerations"]
    assert (taint["key"], taint["value"]) == pool
    assert all(one["key"] != taint["key"] for one in models.pod["tolerations"])
    assert "cpu" in handlers.spec["resources"]["limits"]
    (given,) = (flag for flag in handlers.spec["args"] if flag.startswith("--handler-limits="))
    ceilings = parse_handler_limits(given.partition("=")[2], CEILINGS)
    limits = handlers.spec["resources"]["limits"]
    assert ceilings.memory_bytes < nbytes(limits["memory"])
    assert ceilings.file_bytes < nbytes(limits["ephemeral-storage"])


def test_redis_keeps_its_data_and_its_memory() -> None:
    redis = container("redis")
    command = redis.spec["command"]
    assert command[:4] == ["sh", "/scripts/start.sh", "/run/secrets/redis", "/run/redis/redis.conf"]
    options = dict(zip(command[4::2], command[5::2], strict=True))
    assert (options["--port"], options["--tls-port"]) == ("0", "6379")
    assert options["--appendonly"] == "yes" and options["--appendfsync"] == "always"
    assert options["--maxmemory-policy"] == "noeviction" and options["--maxmemory"] == "1400mb"
    assert 0.75 * nbytes(redis.spec["resources"]["limits"]["memory"]) > 1400e6
    assert_mounted(redis, options["--dir"])
    assert objects("StatefulSet")["redis"]["spec"]["serviceName"] in objects("Service")


def test_backups_have_room_and_are_restored_where_redis_looks() -> None:
    command = container("redis-backup").spec["command"]
    assert command[:4] == ["sh", "/scripts/backup.sh", "/run/secrets/redis", "/backups"]
    claim = objects("PersistentVolumeClaim")["redis-backups"]["spec"]["resources"]["requests"]["storage"]
    assert int(command[4]) * 1400e6 < nbytes(claim)
    job = objects("CronJob")["redis-backup"]["spec"]
    assert job["concurrencyPolicy"] == "Forbid" and command[5:8] == ["-h", "redis", "--tls"]
    # Else their volume could be in another zone than that of Redis, and restore.yaml mounts both.
    (near,) = container("redis-backup").pod["affinity"]["podAffinity"][
        "requiredDuringSchedulingIgnoredDuringExecution"
    ]
    assert near["topologyKey"] == "topology.kubernetes.io/zone" and selected(near["labelSelector"]) == {
        "redis"
    }
    restore = container("redis-restore")
    assert restore.spec["command"] == ["sh", "/scripts/restore.sh", "/backups", "/data"]
    assert_mounted(restore, "/data")


def assert_mounted(one: Container, path: str | None) -> None:
    assert path in {mount["mountPath"] for mount in one.spec["volumeMounts"]}


def assert_time_to_leave(one: Container, grace_s: float) -> None:
    wait_s = float(one.spec["lifecycle"]["preStop"]["exec"]["command"][1])
    assert one.pod["terminationGracePeriodSeconds"] > wait_s + grace_s
