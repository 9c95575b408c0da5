"""Fixtures that several test files share."""

import gc
import os
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadScopeScheduling

from registry.clock import FakeClock
from registry.memory.state import MemoryState
from registry.state import State
from tests.fixtures.loops import anyio_backend as anyio_backend
from tests.fixtures.mount import file_system
from tests.fixtures.platform import Platform
from tests.fixtures.redis import running_redis
from tests.fixtures.state import LAPSE_S, Lapse, empty, empty_state, expiries

_PLATFORMS = ("tests/platform/", "tests/fuzz/test_http.py", "tests/deploy/test_alerts.py")
# With a platform of their own, on which they wait more than they compute: whichever worker is free takes them
# at the end, so that both end together. The longest first.
_LAST = tuple(
    f"tests/platform/test_{name}.py"
    for name in (
        *("live", "state_lost", "lifecycle", "host_copies", "redis_full", "audit", "redis_backup"),
        *("private_state", "function_secrets", "tour", "tls"),
    )
)

# One thread a process: the machine has few cores, and several processes run at once.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Examples may take as long as a slow machine needs. They are the same each time, so that a run can be
# repeated; `make soak` draws new ones and prints how to repeat a failure.
_SLOW = [HealthCheck.too_slow]
settings.register_profile("tests", deadline=None, derandomize=True, suppress_health_check=_SLOW)
settings.register_profile("fresh", deadline=None, print_blob=True, suppress_health_check=_SLOW)
settings.load_profile("fresh" if os.environ.get("HYPERCAST_FRESH_SEEDS") else "tests")


@pytest.fixture(scope="session")
def platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    """Three nodes on three virtual hosts, shared by the whole session; tests use functions of their own."""
    running = Platform(
        data=tmp_path_factory.mktemp("platform"),
        # An instance that starts again loads from host memory.
        flags=(
            *("--nodes", "3", "--hosts", "3", "--keep-hot", "0s"),
            *("--allow-handlers", "--allow-unconfined-handlers"),
            *("--vllm-metrics", "--tenant-metrics", "100"),
        ),
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
    """Yield a Redis of the file's own."""
    with running_redis(tmp_path_factory.mktemp("redis")) as server:
        yield server.url


@pytest.fixture
async def empty_redis_url(redis_url: str) -> str:
    await empty(redis_url)
    return redis_url


@pytest.fixture(params=["memory", "redis"])
async def state(request: pytest.FixtureRequest, redis_url: str) -> AsyncIterator[State]:
    """Yield an empty state, in memory or in Redis."""
    async with empty_state(request.param, redis_url) as state:
        yield state


@pytest.fixture(params=["memory", "redis"])
async def lapsing_state(request: pytest.FixtureRequest, redis_url: str) -> AsyncIterator[tuple[State, Lapse]]:
    """Yield an empty state whose records lapse, and what waits until the next one did."""
    if request.param == "redis":
        async with empty_state("redis", redis_url) as state, expiries(redis_url) as lapse:
            yield state, lapse
        return
    clock = FakeClock()

    async def lapse() -> None:
        clock.advance(LAPSE_S)

    yield MemoryState(clock=clock), lapse


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Yield a folder on a file system of 4 MiB."""
    with file_system(tmp_path / "small", "size=4m") as folder:
        yield folder


def scope(nodeid: str) -> str:
    """Return what one worker runs: most tests that start platforms, which need the processors, or a file."""
    file = nodeid.partition("::")[0]
    return "platforms" if file.startswith(_PLATFORMS) and file not in _LAST else file


def turn(item: pytest.Item) -> int:
    """Return the place in the order: first what takes longest, last what fills the time of either worker."""
    of = scope(item.nodeid)
    return 0 if of == "platforms" else 2 + _LAST.index(of) if of in _LAST else 1


def pytest_collection(session: pytest.Session) -> None:
    gc.disable()  # imports make 700,000 permanent objects: collections among them take 8 s


def pytest_collection_finish(session: pytest.Session) -> None:
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=turn)


class PlatformScheduling(LoadScopeScheduling):
    """Runs the tests of a scope in one worker."""

    def _split_scope(self, nodeid: str) -> str:
        return scope(nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> PlatformScheduling:
    config.option.loadscopereorder = False
    return PlatformScheduling(config, log)
