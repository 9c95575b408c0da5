"""Tests of the console in a browser are skipped where there is none."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fixtures.platform import Platform
from tests.programs import CHROMIUM, missing, reason

pytest.importorskip("selenium", reason="selenium is not installed")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    lacking = missing(CHROMIUM)
    if not lacking:
        return
    here = Path(__file__).parent
    skipped = pytest.mark.skip(reason=reason(lacking))
    for item in items:
        if here in item.path.parents:
            item.add_marker(skipped)


@pytest.fixture(scope="module")
def slow_links(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    """Four nodes on hosts of their own, with links so slow that a cast can be watched."""
    flags = (
        "--nodes",
        "4",
        "--hosts",
        "4",
        "--link-rate",
        "20mbit",
        "--allow-handlers",
        "--allow-unconfined-handlers",
    )
    running = Platform(data=tmp_path_factory.mktemp("console"), flags=flags)
    running.up()
    yield running
    running.down()
