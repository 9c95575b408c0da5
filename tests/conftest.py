"""Fixtures that several test files share."""

import asyncio
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from registry.clock import FakeClock
from registry.memory_state import MemoryState
from registry.redis_connections import Connections
from registry.redis_state import RedisState
from tests.mount_fixture import file_system
from tests.platform_fixture import Platform
from tests.redis_fixture import running_redis
from tests.state_fixture import FEED_LENGTH, LAPSE_S, LapsingScenario, Scenario, expiries

# One thread a process: the machine has few cores, and several processes run at once.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Examples take as long as a slow machine needs; the same ones each time, so that a run can be repeated.
settings.register_profile(
    "tests", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("tests")


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


@pytest.fixture(scope="module", autouse=True)
def one_compute_thread() -> Iterator[None]:
    """Threads of torch that share a busy processor spin: later tests would take ten times as long."""
    torch = sys.modules.get("torch")
    before = torch and torch.get_num_threads()
    yield
    assert torch is None or torch.get_num_threads() == before


@pytest.fixture(scope="session")
def root() -> Path:
    return Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A Redis of the file's own."""
    with running_redis(tmp_path_factory.mktemp("redis")) as server:
        yield server.url


@pytest.fixture(params=["memory", "redis"])
def on_state(request: pytest.FixtureRequest, redis_url: str) -> Callable[[Scenario], None]:
    """Runs a scenario against an empty state."""

    async def in_redis(scenario: Scenario) -> None:
        connections = Connections(redis_url)
        await connections.call("FLUSHALL")
        await connections.aclose()
        async with RedisState.connect(redis_url, feed_length=FEED_LENGTH) as state:
            await scenario(state)

    async def in_memory(scenario: Scenario) -> None:
        await scenario(MemoryState(feed_length=FEED_LENGTH))

    main = in_redis if request.param == "redis" else in_memory
    return lambda scenario: asyncio.run(main(scenario))


@pytest.fixture(params=["memory", "redis"])
def on_lapsing_state(request: pytest.FixtureRequest, redis_url: str) -> Callable[[LapsingScenario], None]:
    """Runs a scenario against an empty state whose records lapse."""

    async def in_redis(scenario: LapsingScenario) -> None:
        connections = Connections(redis_url)
        await connections.call("FLUSHALL")
        await connections.aclose()
        async with RedisState.connect(redis_url) as state, expiries(redis_url) as lapse:
            await scenario(state, lapse)

    async def in_memory(scenario: LapsingScenario) -> None:
        clock = FakeClock()

        async def lapse() -> None:
            clock.advance(LAPSE_S)

        await scenario(MemoryState(clock=clock), lapse)

    main = in_redis if request.param == "redis" else in_memory
    return lambda scenario: asyncio.run(main(scenario))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder on a file system of 4 MiB."""
    with file_system(tmp_path / "small", "size=4m") as folder:
        yield folder
