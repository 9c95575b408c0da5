"""Fixtures that several test files share."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.platform_fixture import Platform

# One thread a process: the machine has few cores, and several processes run at once.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    """Three nodes on three virtual hosts, shared by the whole session; tests use functions of their own."""
    running = Platform(
        data=tmp_path_factory.mktemp("platform"),
        flags=("--nodes", "3", "--hosts", "3", "--allow-handlers"),
    )
    running.up()
    yield running
    running.down()


@pytest.fixture(scope="session")
def root() -> Path:
    return Path(__file__).resolve().parent.parent
