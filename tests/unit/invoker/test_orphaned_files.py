"""What a node had of an image when it was killed, it need not get again when it is back."""

from pathlib import Path

import pytest

from registry.images.manifest import UNIT_BYTES
from registry.messages.images import WarmImage
from tests.fixtures.invoker import FakeCluster, make_image

SIZE = 35 * UNIT_BYTES + 5


@pytest.mark.parametrize(
    ("ranges", "damaged", "missing"),
    [
        ([(0, SIZE)], [], 0),
        ([(0, SIZE)], [0, 4, 5], 3 * UNIT_BYTES),
        ([(0, SIZE)], [35], 5),
        ([(2 * UNIT_BYTES + 4096, SIZE)], [7], 4 * UNIT_BYTES),
        ([(0, UNIT_BYTES + 4096), (5 * UNIT_BYTES, 6 * UNIT_BYTES)], [], SIZE - 2 * UNIT_BYTES),
        ([], [], SIZE),
    ],
)
async def test_a_node_that_returns_keeps_what_is_sound(
    tmp_path: Path, ranges: list[tuple[int, int]], damaged: list[int], missing: int
) -> None:
    image = make_image("a", SIZE)
    async with FakeCluster(tmp_path) as cluster:
        await cluster.put(image)
        left = cluster.shm / "h0" / f"{image.digest}.part"
        for folder in (cluster.shm, left.parent):
            folder.mkdir(mode=0o700)
        with left.open("wb") as file:
            file.truncate(SIZE)
            for start, end in ranges:
                file.seek(start)
                file.write(image.data[start:end])
            for unit in damaged:
                file.seek(unit * UNIT_BYTES)
                file.write(bytes([image.data[unit * UNIT_BYTES] ^ 1]))
        async with cluster.node("n0", "h0") as node:
            await node.ask(WarmImage(image=image.ref()))
            record = await node.record()
            assert record.counters["disk_read_bytes"] == missing
            assert record.holdings[0].image == image.digest
            assert (left.parent / image.digest).read_bytes() == image.data
