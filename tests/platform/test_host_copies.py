"""The cluster's last host copy of an image survives what comes and goes around it."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from registry.images.digests import MARKER_FILE
from registry.images.manifest import UNIT_BYTES
from tests.fixtures.checkpoints import write_checkpoint
from tests.fixtures.platform import Platform

MODELS = ("one", "two", "three")


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    for seed, name in enumerate(MODELS):
        write_checkpoint("llama", folder / name, seed=seed)
    return {name: folder / name for name in MODELS}


@pytest.fixture
def tight(packed: dict[str, Path], tmp_path: Path) -> Iterator[Platform]:
    """Two hosts whose memories hold two of the models each."""
    checkpoints = (sum(f.stat().st_size for f in path.glob("*.safetensors")) for path in packed.values())
    largest = max(checkpoints) + UNIT_BYTES  # an image's header fills a unit
    made = Platform(
        data=tmp_path,
        flags=(
            *("--nodes", "2", "--hosts", "2", "--gpu-memory", "64MiB"),
            *("--host-memory", str(largest * 5 // 2)),
        ),
    )
    made.up()
    yield made
    made.down()


def host_copies(platform: Platform) -> dict[str, list[str]]:
    """Return what lies in the hosts' shared memory now, by host."""
    marker = json.loads((platform.data / "store" / MARKER_FILE).read_text())
    cluster = Path("/dev/shm") / f"hypercast-{marker['cluster']}"
    return {
        tier.name: sorted(path.name for path in tier.iterdir() if len(path.name) == 64)
        for tier in cluster.iterdir()
    }


def test_three_images_in_four_places_are_never_read_from_disk_twice(
    tight: Platform, packed: dict[str, Path]
) -> None:
    images = {}
    sizes = 0
    for name in MODELS:
        made = tight.json("deploy", str(packed[name]), "--name", name, "--keep-alive", "10m")
        images[name] = made["image"]
        sizes += made["bytes"]
    read = lambda: tight.counter("disk_read_bytes") + tight.counter("store_read_bytes")  # noqa: E731
    tight.until("the counters show the deploys", lambda: read() == sizes)
    with tight.http() as http:

        def scale(name: str, instances: int, on: list[str]) -> None:
            body = {"instances": instances, "on": on, "wait": True}
            response = http.post(f"/admin/functions/{name}/scale", json=body)
            assert response.status_code == 200, response.text + tight.logs()

        for step in range(18):
            name, node = MODELS[step % 3], f"node-{step // 3 % 2}"
            scale(name, 1, [node])
            assert {instance["node"] for instance in tight.instances(name)} >= {node}
            scale(name, 0, [])
            held = host_copies(tight)
            missing = {n for n, image in images.items() if not any(image in row for row in held.values())}
            assert not missing, f"step {step}: no host holds {missing}: {held}\n{tight.logs(40)}"
    pinned = lambda: [  # noqa: E731
        holding["image"] for node in tight.nodes() for holding in node["holdings"] if holding.get("pinned")
    ]
    tight.until("each image is pinned once", lambda: sorted(pinned()) == sorted(images.values()))
    assert read() == sizes


def test_the_nodes_of_a_host_share_one_copy(packed: dict[str, Path], tmp_path: Path) -> None:
    made = Platform(
        data=tmp_path,
        flags=("--nodes", "2", "--hosts", "1", "--gpu-memory", "64MiB", "--host-memory", "64MiB"),
    )
    made.up()
    try:
        deployed = made.json("deploy", str(packed["one"]), "--name", "one", "--keep-alive", "10m")
        made.run("scale", "one", "--instances", "2")
        assert {instance["node"] for instance in made.instances("one")} == {"node-0", "node-1"}
        assert [image for row in host_copies(made).values() for image in row] == [deployed["image"]]
        read = lambda: made.counter("disk_read_bytes") + made.counter("store_read_bytes")  # noqa: E731
        made.until("the counters show the load", lambda: read() == deployed["bytes"])
        assert made.counter("cast_recv_bytes") == 0
        # As many bytes of the host's memory as one copy takes, whichever node one asks.
        (free,) = {node["host_free_bytes"] for node in made.nodes()}
        assert (64 << 20) - free < 2 * deployed["bytes"]
    finally:
        made.down()


def test_a_served_model_takes_one_host_copy_and_returns_to_host_memory(
    packed: dict[str, Path], tmp_path: Path
) -> None:
    made = Platform(data=tmp_path, flags=("--nodes", "3", "--hosts", "3", "--keep-hot", "0s"))
    made.up()
    try:
        deployed = made.json("deploy", str(packed["one"]), "--name", "one", "--keep-alive", "10m")

        def copies() -> list[str]:
            return [host for host, row in host_copies(made).items() if deployed["image"] in row]

        made.run("scale", "one", "--instances", "3")
        made.until("the pinned copy is left", lambda: len(copies()) == 1)
        with made.http() as http:
            body = {"model": "one", "prompt": [1, 2, 3], "max_tokens": 2}
            assert http.post("/v1/completions", json=body).status_code == 200
        made.run("scale", "one", "--instances", "0")
        made.until("idle images are in host memory again", lambda: len(copies()) == 3)
        read = made.counter("disk_read_bytes") + made.counter("store_read_bytes")
        assert read == deployed["bytes"]
    finally:
        made.down()
