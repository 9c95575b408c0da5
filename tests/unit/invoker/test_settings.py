from dataclasses import replace
from pathlib import Path

import pytest

from invoker.base.errors import SettingsError
from invoker.device import DeviceFacts, alike, default_arena_bytes, detect_device, slug
from invoker.settings import parse_settings
from registry.config.devices import gpu_indices

SECRET = {"HYPERCAST_CLUSTER_SECRET": "x" * 32}
LEAST = ["--redis-url", "unix:///tmp/r.sock"]


def test_defaults() -> None:
    settings = parse_settings(LEAST, SECRET)
    assert settings.secrets == (b"x" * 32,)
    assert (settings.listen_host, settings.listen_port) == ("127.0.0.1", 0)
    assert settings.advertise == "127.0.0.1"
    assert settings.gpu_memory_bytes is None and settings.link_rate_bytes_s is None
    assert (settings.rdma, settings.rdma_required) == ("auto", False)
    assert settings.lease_s == 6.0 and settings.keep_hot_s == 300.0 and not settings.allow_handlers


def test_all_flags(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("y" * 40 + "\n")
    argv = [*LEAST, "--secret-file", str(secret), "--node-id", "n0", "--host-id", "h0"]
    argv += ["--listen", "0.0.0.0:7400", "--cast-port", "7401", "--advertise", "10.0.0.9"]
    argv += ["--device", "cuda:1", "--gpu-memory", "2GiB", "--host-memory", "512MiB"]
    argv += ["--shm-dir", "/x", "--store", "s3://b", "--link-rate", "10mbit", "--allow-handlers"]
    argv += ["--threads", "3", "--nodes-hint", "4", "--lease-s", "2", "--grace", "5s", "--keep-hot", "1m"]
    settings = parse_settings(argv, {})
    assert settings.secrets == (b"y" * 40,)
    assert (settings.listen_host, settings.listen_port, settings.cast_port) == ("0.0.0.0", 7400, 7401)
    assert (settings.gpu_memory_bytes, settings.host_memory_bytes) == (2 << 30, 512 << 20)
    assert settings.link_rate_bytes_s == 1_250_000
    assert (settings.grace_s, settings.keep_hot_s, settings.device) == (5.0, 60.0, "cuda:1")


@pytest.mark.parametrize(
    ("argv", "environ", "message"),
    [
        ([], SECRET, "--redis-url"),
        (["--redis-url", "redis://r:port/0"], SECRET, "--redis-url: Port could not be cast"),
        (["--redis-url", "redis+sentinel://s/m", "--handler-network"], SECRET, "--handler-network needs"),
        ([*LEAST, "--gpu-memory", "2Qi"], SECRET, "unknown unit 'qi'"),
        ([*LEAST, "--colour", "red"], SECRET, "--colour"),
        ([*LEAST, "--gpu-mem", "2GiB"], SECRET, "--gpu-mem"),
        ([*LEAST, "--device", "tpu"], SECRET, "neither auto, cpu, cuda:N nor emulated:GPU"),
        ([*LEAST, "--listen", "1.2.3.4:port"], SECRET, "'port' is not a number from 0 to 65535"),
        ([*LEAST, "--lease-s", "0"], SECRET, "not between 0.1 and 3600"),
        ([*LEAST, "--node-id", "a/b"], SECRET, "letters, digits"),
        ([*LEAST, "--grace", "5"], SECRET, "no unit"),
        ([*LEAST, "--threads", "0"], SECRET, "1 to 4096"),
        ([*LEAST, "--rdma", "/dev/x"], SECRET, "neither auto, off, DEVICE nor DEVICE:PORT"),
        ([*LEAST, "--rdma", "off", "--require-rdma"], SECRET, "combined with --rdma off"),
        (LEAST, {}, "no cluster secret"),
        (LEAST, {"HYPERCAST_CLUSTER_SECRET": "short"}, "too short"),
        ([*LEAST, "--secret-file", "/nowhere/secret"], {}, "no such file"),
    ],
)
def test_bad_values_are_refused_with_a_reason(argv, environ, message) -> None:
    with pytest.raises(SettingsError) as raised:
        parse_settings(argv, environ)
    assert message in str(raised.value)


def test_help_has_examples(capsys) -> None:
    with pytest.raises(SystemExit) as leaving:
        parse_settings(["--help"], {})
    assert leaving.value.code == 0
    assert "Examples:" in capsys.readouterr().out


@pytest.mark.parametrize("listen", ["[::1]:80", "::1", "node-7:80"])
def test_addresses(listen: str) -> None:
    settings = parse_settings([*LEAST, "--listen", listen], SECRET)
    assert settings.listen_host == listen.replace("[", "").split("]")[0].removesuffix(":80")


def test_a_node_has_one_gpu_or_several() -> None:
    for device, indices in (("cuda", (0,)), ("cuda:3", (3,)), ("cuda:2,0", (2, 0)), ("cpu", ())):
        assert gpu_indices(parse_settings([*LEAST, "--device", device], SECRET).device) == indices
    for device in (
        "cuda:",
        "cuda:0,",
        "cuda:0,0",
        "cuda:x",
        "cuda0",
        "cuda:" + ",".join(map(str, range(65))),
    ):
        with pytest.raises(SettingsError, match="--device"):
            parse_settings([*LEAST, "--device", device], SECRET)


def test_the_gpus_of_a_node_are_alike() -> None:
    gpus = [
        DeviceFacts(device=f"cuda:{index}", gpu_type="nvidia-h200", memory_bytes=100, free_bytes=90 - index)
        for index in (2, 5)
    ]
    node = alike(gpus)
    assert (node.device, node.gpu_count, node.free_bytes) == ("cuda:2,5", 2, 88)
    assert alike(gpus[:1]) == gpus[0]
    with pytest.raises(SettingsError, match="cuda:2 is a nvidia-h200, cuda:5 a nvidia-l4"):
        alike([gpus[0], replace(gpus[1], gpu_type="nvidia-l4")])


def test_device_facts_and_default_sizes() -> None:
    facts = detect_device("cpu")
    assert facts.gpu_type == "cpu" and facts.memory_bytes >= facts.free_bytes > 0
    small = DeviceFacts(device="cpu", gpu_type="cpu", memory_bytes=4 << 30, free_bytes=1 << 30)
    assert default_arena_bytes(small, 1) == 1 << 30
    assert default_arena_bytes(small, 4) == 256 << 20
    gpu = DeviceFacts(device="cuda:0", gpu_type="nvidia-h200", memory_bytes=100, free_bytes=90)
    assert default_arena_bytes(gpu, 4) == 81
    assert slug("NVIDIA H200") == "nvidia-h200"
