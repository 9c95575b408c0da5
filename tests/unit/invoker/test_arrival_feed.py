"""What arrives on a node, as it is reported to gateways whose users watch a load."""

import asyncio
from contextlib import aclosing
from pathlib import Path

import pytest

from invoker.instances.arrival_feed import cell_bytes, follow_arrivals
from registry.clock import SystemClock
from registry.images.manifest import UNIT_BYTES
from registry.messages.arrivals import MAX_CELLS, Arrivals
from tests.fixtures.invoker import make_image
from tests.fixtures.stored_image import partial_image


async def test_reports_follow_what_arrives_and_end_with_the_load(tmp_path: Path) -> None:
    with partial_image(tmp_path, make_image("feed", 5 * UNIT_BYTES)) as target:
        loading = [target]
        async with aclosing(follow_arrivals(lambda: loading, list, SystemClock(), 0.001)) as feed:
            first = await anext(feed)
            assert _held(first) == (0, 5) and first.images[0].image == target.manifest.sha256
            target.mark(UNIT_BYTES, 2 * UNIT_BYTES)
            second = await anext(feed)
            assert _held(second) == (0b110, 5) and second.at >= first.at
            waiting = asyncio.ensure_future(anext(feed))
            target.mark(4 * UNIT_BYTES, UNIT_BYTES)  # the last unit of the image
            assert _held(await waiting) == (0b10110, 5)
            loading.clear()
            assert (await anext(feed)).images == ()


@pytest.mark.parametrize("units", [1, MAX_CELLS, MAX_CELLS + 1, 100_000, 400_001])
def test_an_image_of_any_size_has_a_bounded_number_of_cells(units: int) -> None:
    cell = cell_bytes(units * UNIT_BYTES - 1)
    assert cell % UNIT_BYTES == 0
    cells = -(-units * UNIT_BYTES // cell)
    assert min(units, MAX_CELLS // 2) <= cells <= MAX_CELLS


def _held(report: Arrivals) -> tuple[int, int]:
    (image,) = report.images
    return int.from_bytes(image.held, "little"), image.cells
