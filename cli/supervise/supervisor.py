"""The process that `up` is: it starts the parts in order, starts again what dies, and stops all."""

import asyncio
import contextlib
import fcntl
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import httpx2

from cli import run_file
from cli.announce import announce
from cli.children import Child, Forked
from cli.errors import CliError, UsageError
from cli.leftovers import cluster_of, remove_leftovers
from cli.logtail import tail
from cli.orphans import orphans_taken, reap_strays
from cli.ports import usable_ports
from cli.progress import note
from cli.up_settings import UpSettings
from registry.embedded_redis import EmbeddedRedis
from registry.errors import RegistryError
from registry.redis_state import RedisState
from registry.secrets import load_or_create_secret

logger = logging.getLogger("hypercast.up")

READY_TIMEOUT_S = 120.0
REDIS_TIMEOUT_S = 20.0
FORCE_S = 1.0
SLOW_FORCE_S = 2.0
LEFTOVER_TIMEOUT_S = 40.0  # a gateway whose supervisor was killed drains for so long at most


class Supervisor:
    """Runs the parts of one data directory until it is told to stop."""

    def __init__(self, settings: UpSettings, ready_fd: int | None) -> None:
        self._settings = settings
        self._ready_fd = ready_fd
        self._logs = settings.data_dir / "logs"
        self._parts: list[Child | Forked] = []

    async def run(self) -> None:
        """Start everything, say so, and stay until SIGINT or SIGTERM. Raises CliError if a part fails."""
        settings = self._settings
        self._logs.mkdir(parents=True, exist_ok=True)
        with lock(settings.data_dir), orphans_taken():
            stop = asyncio.Event()
            loop = asyncio.get_running_loop()
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.add_signal_handler(number, stop.set)
            async with AsyncExitStack() as parts:
                reaping = asyncio.create_task(reap_strays(self._pids), name="reap strays")
                parts.push_async_callback(ended, reaping)
                urls = await self._start(parts, stop)
                if stop.is_set():
                    note("stopping")
                    return
                run_file.write(settings.data_dir, urls, settings.nodes)
                parts.callback(run_file.path_in(settings.data_dir).unlink, missing_ok=True)
                self._announce(urls)
                await until_stopped(stop, self._parts)
                note("stopping")

    def _pids(self) -> set[int]:
        return {pid for part in self._parts for pid in part.pids}

    async def _start(self, parts: AsyncExitStack, stop: asyncio.Event) -> list[str]:
        """Redis first, then the gateways and the nodes side by side. Returns the gateways' addresses.

        Parts stop in the opposite order, so the nodes can still say good-bye to Redis.
        """
        settings = self._settings
        secret_file = settings.data_dir / "cluster.secret"
        load_or_create_secret(secret_file)
        await asyncio.to_thread(remove_leftovers, cluster_of(settings.data_dir), settings.shm_dir)
        ports = await self._ports()
        redis_url = settings.redis_url
        if redis_url is not None:
            await answering_redis(redis_url)
        else:
            redis = EmbeddedRedis(settings.data_dir, appendfsync=settings.appendfsync)
            redis.prepare()
            child = Child("redis", redis.command(), self._logs, redis.tidy)
            self._parts.append(child)
            await parts.enter_async_context(child)
            await self._redis_ready(redis, child, stop)
            if stop.is_set():
                return []
            if settings.appendfsync == "everysec":
                forcing = asyncio.create_task(
                    force_each_second(redis.force_to_disk), name="force Redis to disk"
                )
                parts.push_async_callback(ended, forcing)
            redis_url = redis.url
        nodes = Forked(
            "zygote", zygote("invoker"), invoker_arguments(settings, redis_url, secret_file), self._logs
        )
        names = zip(gateway_names(settings.gateways), ports, strict=True)
        flags = {
            name: gateway_arguments(settings, redis_url, secret_file, name, port) for name, port in names
        }
        gateways = Forked("zygote-gateway", zygote("gateway"), flags, self._logs)
        for part in (nodes, gateways):
            self._parts.append(part)
            await parts.enter_async_context(part)
        address = "127.0.0.1" if settings.host in ("0.0.0.0", "") else settings.host
        host = f"[{address}]" if ":" in address else address
        urls = [f"http://{host}:{port}" for port in ports]
        await self._answering(urls, stop, (gateways, nodes))
        return urls

    async def _ports(self) -> tuple[int, ...]:
        """The ports to listen on, once the parts of an earlier run that was killed have ended."""
        settings = self._settings
        redis = EmbeddedRedis(settings.data_dir) if settings.redis_url is None else None
        leftovers = run_file.read(settings.data_dir) is not None or (redis is not None and redis.answers())
        deadline_s = time.monotonic() + (LEFTOVER_TIMEOUT_S if leftovers else 0.0)
        told = False
        while True:
            last = time.monotonic() >= deadline_s
            try:
                if last or redis is None or not redis.answers():
                    return usable_ports(settings.host, settings.ports)
            except CliError as exc:
                if last or isinstance(exc, UsageError):
                    raise
            if not told:
                note("waiting for the parts of an earlier run to end")
                told = True
            await asyncio.sleep(0.1)

    async def _redis_ready(self, redis: EmbeddedRedis, child: Child, stop: asyncio.Event) -> None:
        ready = asyncio.ensure_future(redis.wait_ready(REDIS_TIMEOUT_S))
        waits = [ready, asyncio.ensure_future(child.died()), asyncio.ensure_future(stop.wait())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if stop.is_set():
                return
            if not ready.done():
                raise CliError(f"Redis did not start:\n{tail(self._logs / 'redis.log')}")
            await ready
        finally:
            for task in waits:
                task.cancel()
            await asyncio.gather(*waits, return_exceptions=True)

    async def _answering(self, urls: Sequence[str], stop: asyncio.Event, parts: Sequence[Forked]) -> None:
        """Wait until /readyz answers 200 everywhere, a part dies at its start, or the user stops it."""
        failures = [asyncio.ensure_future(part.died()) for part in parts]
        waits = [
            asyncio.ensure_future(all_ready(urls)),
            asyncio.ensure_future(stop.wait()),
            *failures,
        ]
        try:
            done, _ = await asyncio.wait(waits, timeout=READY_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
            for failure in failures:
                if failure in done and not stop.is_set():
                    name = failure.result()
                    raise CliError(f"{name} died at its start:\n{tail(self._logs / f'{name}.log')}")
            if not done:
                raise CliError(
                    f"{' or '.join(urls)}: /readyz has not answered within {READY_TIMEOUT_S:g} s:\n"
                    f"{tail(self._logs / 'gateway.log')}"
                )
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)

    def _announce(self, urls: Sequence[str]) -> None:
        if self._ready_fd is not None:
            with os.fdopen(self._ready_fd, "w") as pipe:
                pipe.write("ready\n")
        else:
            announce(self._settings, urls)
            note("Ctrl-C stops it.")


async def answering_redis(url: str) -> None:
    """Return if a Redis answers at `url`. Raises CliError."""
    try:
        async with RedisState.connect(url, timeout_s=2.0) as state:
            await state.ping()
    except RegistryError as exc:
        raise CliError(f"--redis-url: {exc}") from exc


async def until_stopped(stop: asyncio.Event, parts: Sequence[Child | Forked]) -> None:
    """Return once told to stop. Raises CliError if a part is no longer started again when it dies."""
    told = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait([told, *(part.keeper for part in parts)], return_when=asyncio.FIRST_COMPLETED)
    finally:
        await ended(told)
    for part in parts:
        if part.keeper.done() and not stop.is_set():
            exc = part.keeper.exception()
            logger.error("%s is not looked after any more", part.name, exc_info=exc)
            raise CliError(f"{part.name} cannot be kept running: {exc!r}")


async def ended(task: asyncio.Task[object]) -> None:
    """Cancel a task and wait for its end."""
    task.cancel()
    await asyncio.wait([task])


async def force_each_second(
    force: Callable[[], None], *, every_s: float = FORCE_S, slow_s: float = SLOW_FORCE_S
) -> None:
    """Have what Redis wrote on the disk about each second, until cancelled; `force` blocks."""
    failing = ""
    slow = False

    def warn() -> None:
        nonlocal slow
        if not slow:
            logger.warning("forcing what Redis wrote to the disk takes more than %g s", slow_s)
        slow = True

    while True:
        await asyncio.sleep(every_s)
        began_s = time.monotonic()
        warning = asyncio.get_running_loop().call_later(slow_s, warn)
        try:
            await asyncio.to_thread(force)
        except OSError as exc:
            if str(exc) != failing:
                failing = str(exc)
                logger.error("what Redis wrote cannot be forced to the disk: %s", exc)
        else:
            failing = ""
        finally:
            warning.cancel()
        if time.monotonic() - began_s < slow_s:
            slow = False


async def all_ready(urls: Sequence[str]) -> None:
    """Return once every gateway says that it and the nodes are ready."""
    async with asyncio.TaskGroup() as group:
        for url in urls:
            group.create_task(ready(url))


async def ready(url: str) -> None:
    """Return once the gateway says that it and its nodes are ready."""
    wait_s = 0.02
    async with httpx2.AsyncClient(trust_env=False, timeout=5.0) as http:
        while True:
            with contextlib.suppress(httpx2.HTTPError):
                if (await http.get(f"{url}/readyz")).status_code == 200:
                    return
            await asyncio.sleep(wait_s)
            wait_s = min(0.1, wait_s * 1.5)


@contextlib.contextmanager
def lock(data_dir: Path) -> Iterator[None]:
    """Hold the data directory for this process."""
    with (data_dir / "up.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as exc:
            raise CliError(f"another `hypercast up` uses {data_dir}") from exc
        yield


def gateway_names(count: int) -> list[str]:
    """The names of the gateways: of their logs, and in the cluster."""
    return ["gateway", *(f"gateway-{index}" for index in range(1, count))]


def zygote(program: str) -> Sequence[str]:
    """The command of what forks it."""
    return sys.executable, "-m", "cli.zygote", program


def gateway_arguments(
    settings: UpSettings, redis_url: str, secret_file: Path, name: str, port: int
) -> Sequence[str]:
    """The flags of one gateway."""
    data = settings.data_dir
    return [
        # Its own name, so that one that starts again has the controller's lease back at once.
        *("--gateway-id", name),
        *("--host", settings.host, "--port", str(port)),
        *("--redis-url", redis_url, "--secret-file", str(secret_file)),
        *("--store", str(data / "store"), "--data-dir", str(data)),
        *("--admin-key-file", str(data / "admin.key")),
        *("--expect-nodes", str(settings.nodes)),
    ]


def invoker_arguments(settings: UpSettings, redis_url: str, secret_file: Path) -> dict[str, list[str]]:
    """The flags of each node, by its id."""
    shared = [
        *("--redis-url", redis_url, "--secret-file", str(secret_file)),
        *("--threads", str(settings.threads), "--nodes-hint", str(settings.nodes)),
        *("--shm-dir", str(settings.shm_dir)),
    ]
    for flag, value in (
        ("--gpu-memory", settings.gpu_memory),
        ("--host-memory", settings.host_memory),
        ("--link-rate", settings.link_rate),
        ("--meter-interval", settings.meter_interval),
        ("--kv-moves", settings.kv_moves),
    ):
        if value is not None:
            shared += [flag, value]
    if settings.cast_tls is not None:
        tls = settings.cast_tls
        shared += [
            "--cast-tls-cert",
            str(tls.cert),
            "--cast-tls-key",
            str(tls.key),
            "--cast-tls-ca",
            str(tls.ca),
        ]
    if settings.allow_handlers:
        shared.append("--allow-handlers")
    nodes = {}
    for index, (host, device) in enumerate(zip(settings.host_ids, settings.devices, strict=True)):
        own = ["--node-id", f"node-{index}", "--device", device]
        if host is not None:
            own += ["--host-id", host]
        nodes[f"node-{index}"] = [*own, *shared]
    return nodes
