"""The disk of an emulated node."""

from pathlib import Path

import pytest

from invoker.emulated.disk import EmulatedDiskReader
from tests.fixtures.emulated import SleepTime


def test_reads_take_as_long_as_the_disk_does_one_after_another(tmp_path: Path) -> None:
    blob = bytes(range(256)) * 8192  # enough to be read past the page cache from a real disk
    (tmp_path / "blob").write_bytes(blob)
    time_s = SleepTime(now_s=0.0)
    clock = time_s.clock()
    readers = [EmulatedDiskReader(tmp_path / "blob", clock, bytes_per_s=1 << 20) for _ in range(2)]
    into = memoryview(bytearray(1 << 20))
    for place, reader in enumerate(readers, 1):
        assert reader.cached(0, len(into)) is None and not reader.is_direct
        reader.read_into(0, into)
        assert time_s.now_s == pytest.approx(place)
        assert into == blob[: 1 << 20]
        reader.close()
