"""The Kubernetes manifests, played by podman: the pods that kustomize makes for processors serve over TLS.

Played are the templates of Redis, a gateway and an invoker, each as a pod with the name of its Service, with
their images, arguments, users, rights, probes and mounts. Changed is only what podman has no means for
(`as_pod`): projected volumes, volumes in memory, and the names and addresses that a cluster puts into the
environment, and from there into arguments. Services, DaemonSets, network policies and cert-manager stay with
the checks of tests/deploy.
"""

import copy
import json
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from tests.containers.conftest import note
from tests.containers.podman import Failed, Podman
from tests.fixtures.manifests import KUBERNETES, NAMESPACE, Object, render, template
from tests.fixtures.patience import until_seen

pytestmark = pytest.mark.containers
NETWORK = "hypercast-kube-test"
MEMORY = Path("/dev/shm") / NETWORK
PODS = ("redis", "hypercast-gateway", "hypercast-invoker")
ADMIN_KEY = "hc_" + "1" * 16 + "_" + "2" * 64
PASSWORDS = {"redis_password": "3" * 64, "backup_password": "4" * 64}
CLUSTER = {"cluster.secret": "5" * 64, "admin.key": ADMIN_KEY}
# What a node gives a pod, and podman does not.
FIELDS = {"spec.nodeName": "machine-1", "status.podIP": "hypercast-invoker"}


@dataclass(frozen=True, slots=True)
class Played:
    """Pods of the manifests."""

    podman: Podman
    folder: Path
    made: list[Object]

    def template(self, name: str) -> Object:
        """Return the template of a workload's pods."""
        (found,) = (
            one
            for one in self.made
            if one["kind"] in ("Deployment", "DaemonSet", "StatefulSet") and one["metadata"]["name"] == name
        )
        return template(found)

    def play(self, *documents: Object) -> None:
        text = yaml.safe_dump_all(documents)
        self.podman.run("kube", "play", f"--network={NETWORK}", "-", stdin=text)

    def container(self, pod: str) -> str:
        """Return the name of a pod's container."""
        (spec,) = self.template(pod)["spec"]["containers"]
        return f"{pod}-{spec['name']}"

    def exec(self, pod: str, *command: object) -> str:
        return self.podman.run("exec", self.container(pod), *command)

    def hypercast(self, *arguments: object) -> str:
        """Run the command of the image in the gateway's pod, over TLS and by the gateway's name."""
        settings = {
            "HYPERCAST_API_KEY": ADMIN_KEY,
            "HYPERCAST_URL": "https://hypercast-gateway:8080",
            "HYPERCAST_CA_FILE": "/etc/hypercast/tls/ca.crt",
        }
        env = [f"--env={name}={value}" for name, value in settings.items()]
        try:
            return self.podman.run("exec", *env, self.container("hypercast-gateway"), "hypercast", *arguments)
        except Failed as error:
            raise Failed(f"{error}\n{self.logs()}") from None

    def probe(self, pod: str, which: str) -> bool:
        """Carry out a probe of the manifest."""
        (spec,) = self.template(pod)["spec"]["containers"]
        how = spec[which]
        ports = {port["name"]: port["containerPort"] for port in spec.get("ports", [])}
        if "exec" in how:
            done = self.podman.attempt("exec", self.container(pod), *how["exec"]["command"])
            return done.returncode == 0
        if "tcpSocket" in how:
            port = ports[how["tcpSocket"]["port"]]
            script = f"import socket; socket.create_connection(('127.0.0.1', {port}), 3)"
        else:
            get = how["httpGet"]
            url = f"{get['scheme'].lower()}://127.0.0.1:{ports[get['port']]}{get['path']}"
            script = (
                "import ssl, urllib.request as u; "
                f"u.urlopen({url!r}, timeout=3, context=ssl._create_unverified_context())"
            )
        return self.podman.attempt("exec", self.container(pod), "python", "-c", script).returncode == 0

    def logs(self) -> str:
        ends = []
        for pod in PODS:
            done = self.podman.attempt("logs", "--tail", "30", self.container(pod))
            ends.append(f"--- {pod}\n{done.stdout}{done.stderr}")
        return "\n".join(ends)


def secrets_of(folder: Path) -> dict[str, dict[str, bytes]]:
    """Return the Secrets by name: those made by hand, and the certificates of certificates.sh."""
    made = subprocess.run(
        ["sh", KUBERNETES / "certificates.sh", folder / "made"], capture_output=True, text=True, check=False
    )
    assert made.returncode == 0, made.stderr
    tls = {
        name: {
            "ca.crt": (folder / "made" / "ca.crt").read_bytes(),
            "tls.crt": (folder / "made" / f"{name}.crt").read_bytes(),
            "tls.key": (folder / "made" / f"{name}.key").read_bytes(),
        }
        for name in ("hypercast-gateway-tls", "hypercast-node-tls", "redis-tls")
    }
    by_hand = {"hypercast-cluster": CLUSTER, "redis-passwords": PASSWORDS}
    return {**tls, **{name: {k: v.encode() for k, v in one.items()} for name, one in by_hand.items()}}


def lay(volume: Object, secrets: dict[str, dict[str, bytes]], folder: Path, group: int) -> Object:
    """Write a projected volume of Secrets into a folder, as a kubelet does; return its volume."""
    folder.mkdir(parents=True)
    for source in volume["projected"]["sources"]:
        values = secrets[source["secret"]["name"]]
        for item in source["secret"].get("items", [{"key": key, "path": key} for key in values]):
            file = folder / item["path"]
            file.parent.mkdir(exist_ok=True)
            file.write_bytes(values[item["key"]])
            file.chmod(volume["projected"]["defaultMode"])
    for path in [folder, *folder.rglob("*")]:
        shutil.chown(path, 0, group)
        if path.is_dir():
            path.chmod(0o750)
    return {"name": volume["name"], "hostPath": {"path": str(folder), "type": "Directory"}}


def as_pod(name: str, pods: Object, secrets: dict[str, dict[str, bytes]], folder: Path) -> Object:
    """Return the pod of a template, with what podman cannot do done by hand."""
    spec = copy.deepcopy(pods["spec"])
    user = spec["securityContext"]
    volumes = []
    for volume in spec["volumes"]:
        if "projected" in volume:
            volume = lay(volume, secrets, folder / name / volume["name"], user["fsGroup"])
        elif volume.get("emptyDir", {}).get("medium") == "Memory":
            memory = MEMORY / name / volume["name"]
            memory.mkdir(parents=True)
            shutil.chown(memory, user["runAsUser"], user["fsGroup"])
            volume = {"name": volume["name"], "hostPath": {"path": str(memory), "type": "Directory"}}
        volumes.append(volume)
    if name == "redis":  # the claim of the StatefulSet's template
        volumes.append({"name": "data", "persistentVolumeClaim": {"claimName": f"{NETWORK}-redis"}})
    spec["volumes"] = volumes
    (one,) = spec["containers"]
    known = {**FIELDS, "metadata.name": name}
    for entry in one.get("env", []):
        field = entry.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath")
        if field in known:
            del entry["valueFrom"]
            entry["value"] = known[field]
    values = {entry["name"]: entry["value"] for entry in one.get("env", []) if "value" in entry}
    args = one.get("args", [])
    one["args"] = [re.sub(r"\$\((\w+)\)", lambda match: values[match[1]], flag) for flag in args]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": pods["metadata"]["labels"]},
        "spec": spec,
    }


@pytest.fixture(scope="module")
def played(podman: Podman, image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Played]:
    """Play the overlay for processors, smaller than on a real machine."""
    made = render(KUBERNETES / "overlays" / "cpu")
    folder = tmp_path_factory.mktemp("kube")
    played = Played(podman, folder, made)
    secrets = secrets_of(folder)
    scripts = next(one for one in made if one["kind"] == "ConfigMap")
    assert scripts["metadata"]["namespace"] == NAMESPACE
    remove(podman)
    podman.run("network", "create", NETWORK)
    begin_s = time.monotonic()
    try:
        for name in PODS:
            pod = as_pod(name, played.template(name), secrets, folder / "volumes")
            shrink(pod)
            played.play(scripts, pod)
            until_seen(
                f"{name} is ready", lambda one=name: played.probe(one, "readinessProbe"), failing=played.logs
            )
            note(f"pod {name}", f"ready after {time.monotonic() - begin_s:.1f} s")
        yield played
    finally:
        remove(podman)


def shrink(pod: Object) -> None:
    """Let a pod of a large machine fit a small one; the numbers are checked in tests/deploy."""
    (one,) = pod["spec"]["containers"]
    small = {"--host-memory=48GiB": "--host-memory=512MiB", "--gpu-memory=8GiB": "--gpu-memory=512MiB"}
    one["args"] = [small.get(flag, flag) for flag in one.get("args", [])]
    one["resources"] = {"limits": {"memory": "3Gi"}}
    if not one["args"]:
        del one["args"]


def remove(podman: Podman) -> None:
    """Remove what a run made, or one that was killed."""
    podman.attempt("pod", "rm", "--force", "--time", "0", *PODS)
    podman.attempt("volume", "rm", "--force", "hypercast-store", f"{NETWORK}-redis", "redis-scripts")
    podman.attempt("network", "rm", "--force", NETWORK)
    shutil.rmtree(MEMORY, ignore_errors=True)


def test_the_pods_serve_a_function_over_tls(played: Played) -> None:
    played.hypercast("deploy", "example:tiny-coder", "--name", "coder")
    text = played.hypercast("invoke", "coder", "-p", "import os\n", "-n", 12)
    assert text.strip()
    (node,) = json.loads(played.hypercast("nodes", "-o", "json"))
    assert (node["id"], node["device"], node["state"]) == ("machine-1", "cpu", "ready")


@pytest.mark.parametrize("pod", PODS)
@pytest.mark.parametrize("which", ["startupProbe", "livenessProbe", "readinessProbe"])
def test_probes_pass(pod: str, which: str, played: Played) -> None:
    assert played.probe(pod, which), played.logs()


@pytest.mark.parametrize("pod", PODS)
def test_containers_have_no_rights(pod: str, played: Played) -> None:
    found = played.podman.inspect(played.container(pod))
    lines = Path(f"/proc/{found['State']['Pid']}/status").read_text().splitlines()
    status = {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}
    user = played.template(pod)["spec"]["securityContext"]["runAsUser"]
    assert status["Uid"].split() == [str(user)] * 4
    assert int(status["CapEff"], 16) == int(status["CapBnd"], 16) == 0 and status["NoNewPrivs"] == "1"
    wrote = played.podman.attempt("exec", played.container(pod), "touch", "/probe")
    assert wrote.returncode and "Read-only file system" in wrote.stderr


def test_a_readiness_probe_fails_without_redis(played: Played) -> None:
    played.podman.run("stop", "--time", 60, played.container("redis"))
    until_seen("the gateway is not ready", lambda: not played.probe("hypercast-gateway", "readinessProbe"))
    assert played.probe("hypercast-gateway", "livenessProbe"), "a restart would not help"
    played.podman.run("start", played.container("redis"))
    until_seen(
        "it is again", lambda: played.probe("hypercast-gateway", "readinessProbe"), failing=played.logs
    )
    assert played.hypercast("invoke", "coder", "-p", "import os\n", "-n", 4).strip()


@pytest.mark.parametrize("pod", ["hypercast-invoker", "hypercast-gateway", "redis"])
def test_pods_stop_gracefully(pod: str, played: Played) -> None:
    limit_s = played.template(pod)["spec"]["terminationGracePeriodSeconds"]
    (spec,) = played.template(pod)["spec"]["containers"]
    hook = spec.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command")
    begin_s = time.monotonic()
    if hook is not None:
        played.exec(pod, *hook)
    played.podman.run("stop", "--time", limit_s, played.container(pod))
    took_s = time.monotonic() - begin_s
    state = played.podman.inspect(played.container(pod))["State"]
    assert state["ExitCode"] == 0 and took_s < limit_s, played.logs()
    note(f"pod {pod} stopped", f"{took_s:.1f} s")
