"""The disk tier of a node, on a platform as users run it."""

import shutil
from pathlib import Path

import pytest

from tests.fixtures.platform import Platform

MODEL = "tiny-coder"


def test_an_image_comes_back_from_the_disk_without_the_store(tmp_path: Path, root: Path) -> None:
    disk = shutil.disk_usage(tmp_path)
    if disk.free < disk.total * 0.05 + (256 << 20):
        pytest.skip(f"the disk tier leaves 5 % of a disk free, and {tmp_path} has {disk.free} bytes")
    platform = Platform(data=tmp_path / "data", flags=("--nodes", "1", "--disk-cache", "1GiB"))
    platform.up()
    try:
        platform.run("deploy", str(root / "functions" / MODEL))

        def node() -> dict[str, object]:
            (found,) = platform.nodes()
            return dict(found)

        def on_disk() -> bool:
            return f"{MODEL}:1" in node()["tiers"]["disk"]  # type: ignore[index]

        platform.until("the image is on the disk", on_disk)
        assert list((platform.data / "disk-cache").glob("*/*/" + "?" * 64))
        platform.run("scale", MODEL, "--instances", "0")
        platform.until("none runs it", lambda: not platform.instances(MODEL))
        before = node()["counters"]
        platform.run("evict", MODEL, "--tier", "gpu")
        platform.run("evict", MODEL)

        def is_back() -> bool:
            now = node()
            read_bytes = now["counters"]["disk_cache_read_bytes"]  # type: ignore[index]
            return read_bytes > 0 and f"{MODEL}:1" in now["tiers"]["host"]  # type: ignore[index]

        platform.until("its copy is back", is_back)
        after = node()["counters"]
        for name in ("disk_read_bytes", "store_read_bytes"):
            assert after[name] == before[name]  # type: ignore[index]
        platform.run("evict", MODEL, "--tier", "disk")
        platform.until("it is gone from the disk", lambda: not on_disk())
    finally:
        platform.down()
