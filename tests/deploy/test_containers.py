"""The containers of the manifests: locked down, bounded, and started as their programs understand."""

from pathlib import Path

import pytest

from gateway.core.settings import parse as parse_gateway
from invoker.handlers.confine import CEILINGS
from invoker.settings import parse_settings as parse_invoker
from registry.config.function_yaml import parse_handler_limits
from tests.fixtures.manifests import (
    Container,
    arguments,
    container,
    containers,
    nbytes,
    objects,
    pods,
    ports_of,
    selected,
)

POOLS = {"hypercast-invoker", "hypercast-handlers"}


def at(flags: list[str], etc: Path) -> list[str]:
    """Return the flags with the mounted files replaced by ones that are there."""
    return [flag.replace("=/etc/hypercast/", f"={etc}/") for flag in flags]


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
    assert not {"nodeSelector", "tolerations"} & set(models.pod), "an overlay says where models run"
    (pool,) = handlers.pod["nodeSelector"].items()
    (taint,) = handlers.pod["tolerations"]
    assert (taint["key"], taint["value"]) == pool
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
