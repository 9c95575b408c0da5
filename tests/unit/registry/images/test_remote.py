"""Models from stores and hubs, read in place: an S3 server, a hub on loopback, file:// URLs."""

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import boto3
import pytest
import s3fs
from moto.server import ThreadedMotoServer

from registry.errors import CheckpointError
from registry.images.assets import collect_assets
from registry.images.pack import hash_image
from registry.images.plan import plan_checkpoint
from registry.images.source import checkpoint_from
from tests.fixtures.checkpoints import write_checkpoint
from tests.fixtures.hub import FakeHub, serving

COMMIT = "a" * 40


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a checkpoint in several shards."""
    folder = tmp_path_factory.mktemp("model")
    write_checkpoint("llama", folder, sharded=True, seed=5)
    (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.fixture(scope="module")
def store() -> Iterator[str]:
    """Run an S3 server."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def bucket(store: str, model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Return the URL of the model in a bucket of its own."""
    for name, value in {
        "AWS_ENDPOINT_URL": store,
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    client = boto3.client("s3")
    client.create_bucket(Bucket="models")
    for path in model.iterdir():
        client.upload_file(str(path), "models", f"tiny/{path.name}")
    yield "s3://models/tiny"
    request = urllib.request.Request(f"{store}/moto-api/reset", method="POST")
    urllib.request.urlopen(request).close()


def test_a_model_of_an_object_store_is_read_in_place(bucket: str, model: Path) -> None:
    found = checkpoint_from(bucket)
    assert (found.url, found.hub_id, found.commit) == (bucket, "", "")
    remote, local = plan_checkpoint(found.folder), plan_checkpoint(model)
    assert remote.layout == local.layout and remote.config == local.config
    assert hash_image(remote) == hash_image(local)
    assert collect_assets(found.folder) == collect_assets(model)


def test_what_an_object_store_cannot_give_has_a_reason(bucket: str) -> None:
    with pytest.raises(CheckpointError, match=r"s3://models/none has no config\.json"):
        checkpoint_from("s3://models/none")
    with pytest.raises(CheckpointError, match="nothing-there"):
        checkpoint_from("s3://nothing-there/x")
    found = plan_checkpoint(checkpoint_from(bucket).folder)
    client = boto3.client("s3")
    for entry in client.list_objects_v2(Bucket="models")["Contents"]:
        client.delete_object(Bucket="models", Key=entry["Key"])
    s3fs.S3FileSystem.clear_instance_cache()
    with pytest.raises(CheckpointError, match="cannot read s3://"):
        hash_image(found)


PROGRAM = """
import json, sys
from registry.images.pack import hash_image
from registry.images.plan import plan_checkpoint
from registry.images.source import checkpoint_from
found = checkpoint_from(sys.argv[1])
image = hash_image(plan_checkpoint(found.folder)).sha256
print(json.dumps([found.hub_id, found.commit, found.url, image]))
"""


def _read(hub: FakeHub, name: str, cache: Path) -> subprocess.CompletedProcess[str]:
    # A process of its own: the hub's library reads its environment when it is imported.
    environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(cache), "HF_HUB_OFFLINE": "0"}
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, name], env=environment, capture_output=True, text=True, check=False
    )


def test_a_commit_of_a_hub_is_read_in_place(model: Path, tmp_path: Path) -> None:
    files = {path.name: path.read_bytes() for path in model.iterdir()}
    hub = FakeHub(hub_id="org/tiny", commits={COMMIT: files}, branches={"main": COMMIT, "v1": COMMIT})
    with serving(hub):
        done = _read(hub, "hf://org/tiny@v1", tmp_path / "cache")
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout) == ["org/tiny", COMMIT, "", hash_image(plan_checkpoint(model)).sha256]
        unknown = _read(hub, "hf://org/tiny@v9", tmp_path / "cache")
        assert unknown.returncode == 1 and "cannot read hf://org/tiny@v9" in unknown.stderr
    assert not list((tmp_path / "cache").rglob("*.safetensors"))  # nothing was downloaded


def test_local_urls_and_unknown_ones(model: Path) -> None:
    assert checkpoint_from(f"file://{model}").folder == model
    for name, words in (
        ("ftp://host/model", "models come from hf://"),
        ("hf://datasets/org/name", "is not hf://ORG/NAME"),
        ("gs://bucket/model", r"pip install 'hypercast\[gs\]'"),
        ("file:///nothing/there", "has no config.json"),
    ):
        with pytest.raises(CheckpointError, match=words):
            checkpoint_from(name)
