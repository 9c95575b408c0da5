"""Where blobs may be kept: paths and URLs, and the marker that names the cluster of a store."""

import asyncio
import json
from pathlib import Path

import pytest

from registry.errors import InvalidRecord, StoreError
from registry.images.fsspec_store import FsspecStore
from registry.images.local_store import LocalStore
from registry.images.store import open_store


@pytest.mark.parametrize("marker", [b"", b"[]", b"{}", b'{"cluster": 5}', b"\xff"])
def test_a_broken_marker_is_an_error(tmp_path: Path, marker: bytes) -> None:
    store = LocalStore(tmp_path)
    (tmp_path / "hypercast-store.json").write_bytes(marker)
    with pytest.raises(StoreError, match=r"hypercast-store\.json"):
        asyncio.run(store.cluster())


def test_the_marker_is_readable_json(tmp_path: Path) -> None:
    asyncio.run(LocalStore(tmp_path).claim("c1"))
    assert json.loads((tmp_path / "hypercast-store.json").read_text()) == {"cluster": "c1"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["blobs", "hypercast-store.json", "partial"]


def test_open_store_takes_paths_and_urls(tmp_path: Path) -> None:
    spaced = tmp_path / "with space"
    assert isinstance(open_store(str(spaced)), LocalStore)
    again = open_store(spaced.as_uri())
    assert isinstance(again, LocalStore)
    assert again.url == spaced.as_uri() == open_store(again.url).url
    assert isinstance(open_store("memory://x"), FsspecStore)


@pytest.mark.parametrize(
    ("url", "error"),
    [
        ("", InvalidRecord),
        ("file://host/x", InvalidRecord),
        ("file://", InvalidRecord),
        ("nosuch://x", StoreError),
    ],
)
def test_a_url_that_leads_nowhere(url: str, error: type[Exception]) -> None:
    with pytest.raises(error):
        open_store(url)


def test_a_store_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="file"):
        open_store(str(tmp_path / "file" / "store"))
