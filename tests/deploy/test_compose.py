"""docker-compose.yml and the Dockerfile: well-formed, consistent, and understood by the programs."""

import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from gateway.core.settings import parse as parse_gateway
from invoker.settings import parse_settings as parse_invoker

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "docker-compose.yml"

Service = dict[str, Any]

_TEXT = {"type": "string", "minLength": 1}
_TEXTS = {"type": "array", "items": _TEXT, "minItems": 1}
_DURATION = {"type": "string", "pattern": r"^(\d+(h|m|s|ms|us))+$"}
_NAMED = {"type": "object", "patternProperties": {"^[a-zA-Z0-9._-]+$": {"type": ["object", "null"]}}}


def _object(required: list[str] | None = None, **properties: object) -> dict[str, object]:
    return {
        "type": "object",
        "properties": properties,
        "required": required or [],
        "additionalProperties": False,
    }


_DEVICE = {
    **_object(
        ["capabilities"],
        driver=_TEXT,
        count={"type": ["integer", "string"]},
        device_ids=_TEXTS,
        capabilities=_TEXTS,
        options={"type": "object"},
    ),
    "not": {"required": ["count", "device_ids"]},
}

# The part of the Compose specification that this file uses; anything else is refused, so that a slip in a
# key's name is found.
SCHEMA = _object(
    ["services"],
    name={"type": "string", "pattern": "^[a-z0-9][a-z0-9_-]*$"},
    services={
        "type": "object",
        "additionalProperties": False,
        "patternProperties": {
            "^[a-zA-Z0-9._-]+$": _object(
                ["image"],
                image=_TEXT,
                build=_object(["context"], context=_TEXT, dockerfile=_TEXT, args={"type": "object"}),
                command=_TEXTS,
                profiles=_TEXTS,
                init={"type": "boolean"},
                user=_TEXT,
                read_only={"type": "boolean"},
                restart={"enum": ["no", "always", "on-failure", "unless-stopped"]},
                stop_grace_period=_DURATION,
                shm_size={"type": "string", "pattern": r"^\d+(b|k|kb|m|mb|g|gb)$"},
                tmpfs=_TEXTS,
                networks=_TEXTS,
                secrets=_TEXTS,
                volumes=_TEXTS,
                ports=_TEXTS,
                cap_add=_TEXTS,
                cap_drop=_TEXTS,
                security_opt=_TEXTS,
                ulimits={"type": "object", "additionalProperties": {"type": "integer"}},
                depends_on={
                    "type": "object",
                    "additionalProperties": _object(
                        ["condition"],
                        condition={
                            "enum": ["service_started", "service_healthy", "service_completed_successfully"]
                        },
                    ),
                },
                healthcheck=_object(
                    ["test"],
                    test={**_TEXTS, "prefixItems": [{"enum": ["CMD", "CMD-SHELL", "NONE"]}]},
                    interval=_DURATION,
                    timeout=_DURATION,
                    start_period=_DURATION,
                    retries={"type": "integer", "minimum": 1},
                ),
                deploy=_object(
                    resources=_object(
                        limits=_object(memory=_TEXT),
                        reservations=_object(devices={"type": "array", "items": _DEVICE, "minItems": 1}),
                    )
                ),
            )
        },
    },
    networks={"type": "object", "additionalProperties": _object(internal={"type": "boolean"}, driver=_TEXT)},
    volumes={
        "type": "object",
        "additionalProperties": _object(
            driver=_TEXT, driver_opts={"type": "object", "additionalProperties": _TEXT}
        ),
    },
    secrets={
        "type": "object",
        "additionalProperties": {
            **_object(file=_TEXT, environment=_TEXT, external={"type": "boolean"}),
            "minProperties": 1,
            "maxProperties": 1,
        },
    },
)


def compose() -> dict[str, Any]:
    """Return the file with its ${NAME:-default} filled in, as `docker compose config` gives it."""
    text = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", FILE.read_text())
    assert "${" not in text, "a variable without a default"
    document = yaml.safe_load(text)
    return {key: value for key, value in document.items() if not key.startswith("x-")}


def services() -> dict[str, Service]:
    found: dict[str, Service] = compose()["services"]
    return found


ONCE = ("backup", "restore")  # run when they are called for, and end
INVOKERS = sorted(name for name in services() if name.startswith("invoker"))


def test_the_file_fits_the_schema() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    jsonschema.Draft202012Validator(SCHEMA).validate(compose())


@pytest.mark.parametrize("slip", ["comand", "healtcheck", "enviroment"])
def test_the_schema_finds_a_slip(slip: str) -> None:
    document = compose()
    document["services"]["gateway"][slip] = ["x"]
    with pytest.raises(jsonschema.ValidationError, match=slip):
        jsonschema.Draft202012Validator(SCHEMA).validate(document)


def test_what_services_name_is_declared() -> None:
    document = compose()
    used: dict[str, set[str]] = {"networks": set(), "volumes": set(), "secrets": set()}
    for name, service in document["services"].items():
        used["networks"] |= set(service.get("networks", []))
        used["secrets"] |= set(service.get("secrets", []))
        sources = {volume.split(":")[0] for volume in service.get("volumes", [])}
        used["volumes"] |= {source for source in sources if not source.startswith("./")}
        assert all((ROOT / source).is_dir() for source in sources if source.startswith("./"))
        for needed, how in service.get("depends_on", {}).items():
            assert needed in document["services"], f"{name} depends on {needed}"
            if how["condition"] == "service_healthy":
                assert "healthcheck" in document["services"][needed]
    for section, names in used.items():
        assert names == set(document[section]), section


def test_redis_keeps_its_data() -> None:
    redis = services()["redis"]
    command = redis["command"]
    assert command[command.index("--appendonly") + 1] == "yes"
    assert command[command.index("--maxmemory-policy") + 1] == "noeviction"
    assert "--maxmemory" in command and redis["deploy"]["resources"]["limits"]["memory"]
    assert "redis:/data" in redis["volumes"]
    assert "ports" not in redis and redis["networks"] == ["backend"]
    assert compose()["networks"]["backend"] == {"internal": True}


def test_redis_has_a_password_and_can_be_backed_up() -> None:
    redis, backup, restore = (services()[name] for name in ("redis", *ONCE))
    assert redis["command"][:4] == ["sh", "/scripts/start.sh", "/run/secrets", "/tmp/redis.conf"]
    assert redis["command"][4:6] == ["--dir", "/data"]
    assert redis["healthcheck"]["test"] == ["CMD", "sh", "/scripts/ready.sh", "/run/secrets"]
    assert set(redis["secrets"]) == {"redis_password", "backup_password"}
    assert backup["command"] == ["sh", "/scripts/backup.sh", "/run/secrets", "/data", "28", "-h", "redis"]
    assert backup["secrets"] == ["backup_password"] and "backups:/data" in backup["volumes"]
    assert restore["command"] == ["sh", "/scripts/restore.sh", "/backups", "/data"]
    assert {"backups:/backups:ro", "redis:/data"} <= set(restore["volumes"]) and "secrets" not in restore
    for name in ONCE:
        assert services()[name]["profiles"] == [name] and "restart" not in services()[name]
    for one in (redis, backup, restore):
        assert one["user"] == "999:1000" and "./deploy/redis:/scripts:ro" in one["volumes"]


def test_no_container_can_fill_the_memory_of_its_machine() -> None:
    for name, service in services().items():
        assert service["deploy"]["resources"]["limits"]["memory"], name


def with_secret(flags: list[str], tmp_path: Path) -> list[str]:
    secret = tmp_path / "secret"
    secret.write_text("0" * 64)
    return [re.sub("/run/secrets/(cluster_secret|redis_password)$", str(secret), flag) for flag in flags]


def mounted(service: Service, path: str) -> bool:
    return any(volume.split(":")[1] == path for volume in service["volumes"])


@pytest.mark.parametrize(("name", "port"), [("gateway", 8080), ("gateway-1", 8081)])
def test_a_gateway_understands_its_command(name: str, port: int, tmp_path: Path) -> None:
    service = services()[name]
    program, *flags = service["command"]
    assert program == "gateway" and "--secret-file=/run/secrets/cluster_secret" in flags
    settings = parse_gateway(with_secret(flags, tmp_path), {})
    assert settings.host == "0.0.0.0" and settings.gateway_id == name
    (published,) = service["ports"]
    assert published == f"127.0.0.1:{port}:{settings.port}", (
        "published on this machine only, unless configured otherwise"
    )
    assert f":{settings.port}/readyz" in service["healthcheck"]["test"][-1]
    assert settings.admin_key_file is not None
    assert mounted(service, settings.store) and mounted(service, str(settings.admin_key_file.parent))
    assert seconds(service["stop_grace_period"]) > settings.grace_s
    assert settings.redis_url == "redis://redis:6379/0" and settings.redis_password


def test_gateways_differ_in_name_and_port_alone() -> None:
    one, other = ({**services()[name]} for name in ("gateway", "gateway-1"))
    assert other.pop("profiles") == ["replica"] and one.pop("build") == {"context": "."}
    for service, name in ((one, "gateway"), (other, "gateway-1")):
        del service["ports"]
        service["command"] = [flag for flag in service["command"] if flag != f"--gateway-id={name}"]
    assert one == other


@pytest.mark.parametrize("name", INVOKERS)
def test_an_invoker_understands_its_command(name: str, tmp_path: Path) -> None:
    service = services()[name]
    program, *flags = service["command"]
    assert program == "invoker" and "--secret-file=/run/secrets/cluster_secret" in flags
    settings = parse_invoker(with_secret(flags, tmp_path), {})
    assert settings.node_id == settings.advertise == name
    assert settings.listen_host == "0.0.0.0" and settings.listen_port
    assert settings.cast_port and settings.stage_port
    beside = [one for one in INVOKERS if services()[one]["profiles"] == service["profiles"]]
    assert settings.nodes_hint == len(beside), "nodes of one machine share its cores and memory"
    assert f"{settings.listen_port})" in service["healthcheck"]["test"][-1]
    assert settings.store_url is not None and mounted(service, settings.store_url)
    assert mounted(service, str(settings.shm_dir))
    assert seconds(service["stop_grace_period"]) > settings.grace_s
    assert str(settings.shm_dir) != "/dev/shm", "a container's own /dev/shm is not shared"
    if settings.device.startswith("cuda"):
        (device,) = service["deploy"]["resources"]["reservations"]["devices"]
        assert device["driver"] == "nvidia" and device["capabilities"] == ["gpu"]
        assert len(device["device_ids"]) == 1 and settings.device == "cuda:0"
        assert service["profiles"] == ["gpu"]
    else:
        assert "reservations" not in service["deploy"]["resources"] and service["profiles"] == ["cpu"]


def test_invokers_share_a_host_tier_and_no_gpu() -> None:
    by_profile: dict[str, list[str]] = {}
    for name in INVOKERS:
        service = services()[name]
        for reservation in (
            service.get("deploy", {}).get("resources", {}).get("reservations", {}).get("devices", [])
        ):
            by_profile.setdefault("gpu", []).extend(reservation["device_ids"])
        assert "--host-id=compose" in service["command"]
        assert "host-tier:/run/hypercast-shm" in service["volumes"]
    assert len(by_profile["gpu"]) == len(set(by_profile["gpu"])) == 2
    options = compose()["volumes"]["host-tier"]["driver_opts"]
    assert options["type"] == "tmpfs" and "size=16g" in options["o"]


def test_own_containers_are_locked_down() -> None:
    for name, service in services().items():
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert name in ONCE or service["restart"] == "unless-stopped"
        tag = service["image"].partition(":")[2]
        assert tag and tag != "latest" and "/" not in service["image"]
        assert service["read_only"] and "cap_add" not in service
        assert name in ("redis", *ONCE) or service["init"]


def test_secrets_are_files_which_read_only_containers_can_mount() -> None:
    names = ("cluster_secret", "redis_password", "backup_password")
    assert compose()["secrets"] == {name: {"file": f"./secrets/{name}"} for name in names}
    assert "/secrets/" in (ROOT / ".gitignore").read_text().splitlines()
    for service in services().values():
        assert "environment" not in service


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to other users")
def test_the_documented_commands_write_secrets_for_the_users_of_the_containers(tmp_path: Path) -> None:
    header = FILE.read_text().partition("\nname:")[0]
    lines = [line.removeprefix("#").strip() for line in header.splitlines()]
    commands = [line for line in lines if "secrets" in line and line.startswith(("mkdir", "for", "sudo"))]
    assert len(commands) == 4
    documented = (ROOT / "docs" / "OPERATIONS.md").read_text()
    assert "\n".join(commands) in documented
    made = subprocess.run(
        ["sh", "-euc", 'sudo() { "$@"; }\n' + "\n".join(commands)], cwd=tmp_path, check=False
    )
    assert made.returncode == 0
    for name, service in services().items():
        uid, gid = map(int, service.get("user", "10001:10001").split(":"))
        for secret in service.get("secrets", []):
            file = tmp_path / compose()["secrets"][secret]["file"]
            found = file.stat()
            assert len(file.read_text().strip()) == 64 and not found.st_mode & 0o007, secret
            readable = (found.st_uid == uid and found.st_mode & 0o400) or (
                found.st_gid == gid and found.st_mode & 0o040
            )
            assert readable, f"{name} cannot read {secret}"


def dockerfile() -> list[tuple[str, str]]:
    """Return the instructions, continued lines joined."""
    lines = (line for line in (ROOT / "Dockerfile").read_text().splitlines() if not line.startswith("#"))
    joined = re.sub(r"\\\n", " ", "\n".join(lines))
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in joined.splitlines() if line)]


def test_the_image_is_built_in_stages_and_runs_without_root() -> None:
    instructions = dockerfile()
    known = {"ARG", "FROM", "RUN", "ENV", "WORKDIR", "COPY", "USER", "EXPOSE", "ENTRYPOINT", "CMD"}
    assert {word for word, _ in instructions} <= known
    stages = [rest for word, rest in instructions if word == "FROM"]
    assert stages == ["${PYTHON_IMAGE} AS build", "${PYTHON_IMAGE}"]
    assert ("ARG", "PYTHON_IMAGE=python:3.11-slim") in instructions
    (user,) = (rest for word, rest in instructions if word == "USER")
    assert user == "10001:10001"
    assert ("ENTRYPOINT", '["hypercast"]') in instructions


def test_the_image_gets_what_it_is_built_from() -> None:
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied: set[str] = set()
    for word, rest in dockerfile():
        if word == "COPY" and not rest.startswith("--from"):
            *sources, _ = shlex.split(rest)
            copied |= set(sources)
    assert copied == kept
    for name in kept:
        assert (ROOT / name).exists(), name
    packages = re.search(r"include = \[(.*)\]", (ROOT / "pyproject.toml").read_text())
    assert packages is not None
    for package in re.findall(r'"(\w+)\*"', packages[1]):
        assert f"{package}/" in copied


def test_the_containers_folders_are_the_images() -> None:
    text = (ROOT / "Dockerfile").read_text()
    for service in services().values():
        for volume in service["volumes"]:
            target = volume.split(":")[1]
            if target.startswith(("/var/lib/hypercast", "/run/hypercast")):
                assert target in text, f"{target} must exist in the image, owned by its user"


def seconds(text: str) -> float:
    assert text.endswith("s")
    return float(text.removesuffix("s"))
