"""Host tiers, of which nothing is left in the end."""

import os
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from invoker.host_tier.tier import HostTier


@pytest.fixture
def folder() -> Iterator[Path]:
    folder = Path("/dev/shm") / f"tier-test-{os.getpid()}-{random.getrandbits(32):08x}" / "h0"
    yield folder
    assert not folder.parent.exists()


@pytest.fixture
def open_tier(folder: Path) -> Iterator[Callable[..., HostTier]]:
    """Open a tier of the folder, by what HostTier is given besides."""
    with ExitStack() as stack:
        yield lambda *given, **options: stack.enter_context(closing(HostTier(folder, *given, **options)))
