"""Folders of the host tier from which other engines load an image."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from invoker.base.errors import HostTierError, HostTierFull, InvalidWork
from invoker.host_tier.folder import MODELS
from invoker.host_tier.image_writer import ImageWriter
from invoker.host_tier.model_folders import MAX_FOLDERS, ModelFolders
from invoker.host_tier.tier import HostTier
from invoker.scratch import scratch_folder
from tests.fixtures.invoker import KIB, FakeCluster

HEADER = b'{"__metadata__":{}}'
IMAGE = len(HEADER).to_bytes(8, "little") + HEADER.ljust(64 * KIB - 8, b" ")
FILES = {"config.json": b"{}", "1_Pooling/config.json": b"[]"}
A, B = "a" * 64, "b" * 64


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[HostTier]:
    tier = HostTier(tmp_path / "shm" / "h0", 100 * KIB)
    _fill(tier, A, IMAGE)
    yield tier
    tier.close()


@pytest.fixture
def folders(tier: HostTier) -> Iterator[ModelFolders]:
    with scratch_folder(tier.directory / MODELS) as root:
        yield ModelFolders(tier, root)


def _fill(tier: HostTier, digest: str, data: bytes) -> None:
    writer = tier.begin(digest, len(data))
    assert isinstance(writer, ImageWriter)
    writer.prepare(0, len(data))
    writer.view[:] = data
    writer.publish().close()


def test_a_folder_has_the_files_and_the_image(tier: HostTier, folders: ModelFolders) -> None:
    path = folders.open("f-1", A, FILES)
    assert {str(one.relative_to(path)) for one in path.rglob("*.*")} == {*FILES, "model.safetensors"}
    assert json.loads((path / "1_Pooling" / "config.json").read_text()) == []
    assert (path / "model.safetensors").read_bytes() == IMAGE
    assert (path / "model.safetensors").stat().st_ino == (tier.directory / A).stat().st_ino
    assert path.stat().st_mode & 0o077 == 0
    assert folders.open("f-1", A, FILES) == path


def test_its_image_stays_until_the_folder_is_closed(tier: HostTier, folders: ModelFolders) -> None:
    path = folders.open("f-1", A, FILES)
    assert not tier.evict(A)
    with pytest.raises(HostTierFull):
        tier.begin(B, 64 * KIB)
    assert folders.close(A) == 1 and not path.exists()
    assert folders.close(A) == 0
    assert tier.evict(A)


def test_folders_may_be_made_again(folders: ModelFolders) -> None:
    path = folders.open("f-1", A, {"config.json": b"old", "gone.json": b"{}"})
    folders.close_all()
    folders.close_all()
    assert not path.exists() and path.parent.exists()
    assert folders.open("f-1", A, FILES) == path and (path / "config.json").read_bytes() == b"{}"


def test_the_last_node_of_a_host_removes_the_folders_of_all(tmp_path: Path) -> None:
    tier = HostTier(tmp_path / "shm" / "h0", 100 * KIB)
    _fill(tier, A, IMAGE)
    killed = tier.directory / MODELS / "killed"
    killed.mkdir(parents=True)
    ModelFolders(tier, killed).open("f-1", A, FILES)
    tier.close()
    assert not (tmp_path / "shm").exists()


@pytest.mark.parametrize("name", ["../f", "/f", "", "a\\b", "f\0"])
def test_names_outside_the_folder_are_refused(tier: HostTier, folders: ModelFolders, name: str) -> None:
    with pytest.raises(InvalidWork, match="not all inside"):
        folders.open("f-1", A, {name: b""})
    with pytest.raises(InvalidWork, match="not all inside"):
        folders.open(name, A, FILES)
    assert tier.evict(A)


def test_images_that_are_no_safetensors_files_are_refused(tier: HostTier, folders: ModelFolders) -> None:
    _fill(tier, B, b"\1" * KIB)
    with pytest.raises(InvalidWork, match="deploy the model again"):
        folders.open("f-1", B, FILES)
    assert tier.evict(B)
    with pytest.raises(HostTierError, match="evicted"):
        folders.open("f-1", B, FILES)


def test_a_folder_that_cannot_be_made_leaves_nothing(tier: HostTier, folders: ModelFolders) -> None:
    with pytest.raises(HostTierError, match="cannot make a folder"):
        folders.open("f-1", A, {"a": b"", "a/b": b""})
    (root,) = (tier.directory / MODELS).iterdir()
    assert list(root.iterdir()) == []
    for number in range(MAX_FOLDERS):
        folders.open(f"f-{number}", A, {})
    with pytest.raises(HostTierError, match="evict some"):
        folders.open("one-more", A, {})
    assert folders.close(A) == MAX_FOLDERS and not list(root.iterdir())


async def test_a_node_removes_the_folders_of_killed_ones(tmp_path: Path) -> None:
    async with FakeCluster(tmp_path) as cluster, cluster.node("n0", "h0"):
        killed = cluster.shm / "h0" / MODELS / "killed"
        killed.mkdir()
        async with cluster.node("n1", "h0"):
            assert not killed.exists() and len(list(killed.parent.iterdir())) == 2
        assert len(list(killed.parent.iterdir())) == 1
