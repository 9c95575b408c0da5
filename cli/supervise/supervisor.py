"""The supervisor of `up`: it starts the parts in order, restarts those that die, and stops all."""

import asyncio
import contextlib
import fcntl
import logging
import os
import signal
import ssl
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import httpx2
from setproctitle import setproctitle

from cli.errors import CliError, UsageError
from cli.interpreter import module_command
from cli.progress import note
from cli.supervise import run_file
from cli.supervise.announce import announce
from cli.supervise.children import Child, Forked
from cli.supervise.leftovers import cluster_of, remove_leftovers
from cli.supervise.logtail import tail
from cli.supervise.orphans import orphans_taken, reap_strays
from cli.supervise.ports import usable_ports
from cli.supervise.rotation import rotate_logs
from cli.supervise.settings import Joined, UpSettings
from rdmacast.aio.groups import cancel_and_discard, cancel_and_wait
from registry.config.command_line import JSON_FLAG
from registry.config.options import Options, encode_options
from registry.config.secrets import load_or_create_secret, redis_password
from registry.config.tls import tls_settings
from registry.errors import RegistryError, StateFull
from registry.redis.embedded import EmbeddedRedis
from registry.redis.state import RedisState

logger = logging.getLogger("hypercast.up")

READY_TIMEOUT_S = 120.0
REDIS_TIMEOUT_S = 20.0
FORCE_S = 1.0
SLOW_FORCE_S = 2.0
READY = "ready"  # the last step that a detached start reports
LEFTOVER_TIMEOUT_S = 40.0  # a gateway whose supervisor was killed drains for at most this long


class Supervisor:
    """The parts of one data directory, until SIGINT or SIGTERM."""

    def __init__(self, settings: UpSettings, ready_fd: int | None) -> None:
        self._settings = settings
        self._ready_fd = ready_fd
        self._logs = settings.data_dir / "logs"
        self._parts: list[Child | Forked] = []

    async def run(self) -> None:
        """Start everything, report it, and stay until SIGINT or SIGTERM. Raises CliError if a part fails."""
        settings = self._settings
        setproctitle("hypercast supervisor")
        self._logs.mkdir(parents=True, exist_ok=True)
        with lock(settings.data_dir), orphans_taken():
            stop = asyncio.Event()
            loop = asyncio.get_running_loop()
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.add_signal_handler(number, stop.set)
            async with AsyncExitStack() as parts:
                reaping = asyncio.create_task(reap_strays(self._pids), name="reap strays")
                parts.push_async_callback(cancel_and_wait, reaping)
                if settings.options.log_bytes:
                    kept = rotate_logs(self._logs, settings.options.log_bytes, settings.options.log_files)
                    rotating = asyncio.create_task(kept, name="rotate logs")
                    parts.push_async_callback(cancel_and_wait, rotating)
                urls = await self._start(parts, stop)
                if stop.is_set():
                    note("stopping")
                    return
                run_file.write(settings.data_dir, urls, settings.nodes)
                parts.callback(run_file.path_in(settings.data_dir).unlink, missing_ok=True)
                self._announce(urls)
                await until_stopped(stop, self._parts)
                note("stopping")

    def _report(self, text: str) -> None:
        """Show a step of the start: here, or by the `up --detach` that waits for it."""
        if self._ready_fd is None:
            note(text)
        else:
            with contextlib.suppress(BrokenPipeError):  # it was interrupted
                os.write(self._ready_fd, f"{text}\n".encode())

    def _pids(self) -> set[int]:
        return {pid for part in self._parts for pid in part.pids}

    async def _start(self, parts: AsyncExitStack, stop: asyncio.Event) -> list[str]:
        """Start Redis, then the gateways and the nodes side by side. Return the gateways' addresses.

        Parts stop in the opposite order, so that nodes can still sign off from Redis.
        """
        settings = self._settings
        secret_file = settings.data_dir / "cluster.secret"
        load_or_create_secret(secret_file)
        await asyncio.to_thread(remove_leftovers, cluster_of(settings.data_dir), settings.options.shm_dir)
        ports = await self._ports()
        redis_url = settings.options.redis_url
        if redis_url is not None:
            await answering_redis(redis_url, settings.options)
        else:
            redis_url = await self._start_redis(parts, stop)
            if stop.is_set():
                return []
        joined = Joined(redis_url=redis_url, secret_file=secret_file)
        of_nodes = {name: arguments(options) for name, options in settings.of_nodes(joined).items()}
        of_gateways = {
            name: arguments(settings.of_gateway(name, port, joined, metrics))
            for name, port, metrics in zip(
                gateway_names(len(ports)), ports, settings.metrics_ports, strict=True
            )
        }
        nodes = Forked("zygote", zygote("invoker"), of_nodes, self._logs)
        gateways = Forked("zygote-gateway", zygote("gateway"), of_gateways, self._logs)
        self._report(f"starting {plural(settings.nodes, 'node')} and {plural(len(ports), 'gateway')}")
        for part in (nodes, gateways):
            self._parts.append(part)
            await parts.enter_async_context(part)
        address = "127.0.0.1" if settings.options.host in ("0.0.0.0", "") else settings.options.host
        host = f"[{address}]" if ":" in address else address
        scheme = "https" if settings.options.tls_cert else "http"
        urls = [f"{scheme}://{host}:{port}" for port in ports]
        await self._answering(urls, stop, (gateways, nodes))
        return urls

    async def _start_redis(self, parts: AsyncExitStack, stop: asyncio.Event) -> str:
        """Start the embedded Redis; return its URL."""
        settings = self._settings
        options = settings.options
        redis = EmbeddedRedis(
            settings.data_dir, appendfsync=options.appendfsync, max_memory_bytes=options.redis_memory_bytes
        )
        redis.prepare()
        child = Child("redis", redis.command(), self._logs, redis.remove_temporary_files)
        self._report("starting Redis")
        self._parts.append(child)
        await parts.enter_async_context(child)
        await self._redis_ready(redis, child, stop)
        if options.appendfsync == "everysec" and not stop.is_set():
            forcing = asyncio.create_task(force_each_second(redis.fsync), name="force Redis to disk")
            parts.push_async_callback(cancel_and_wait, forcing)
        return redis.url

    async def _ports(self) -> tuple[int, ...]:
        """Return the ports to listen on, once the parts of an earlier, killed run have ended."""
        settings = self._settings
        redis = EmbeddedRedis(settings.data_dir) if settings.options.redis_url is None else None
        leftovers = run_file.read(settings.data_dir) is not None or (redis is not None and redis.is_running())
        deadline_s = time.monotonic() + (LEFTOVER_TIMEOUT_S if leftovers else 0.0)
        reported = False
        while True:
            last = time.monotonic() >= deadline_s
            try:
                if last or redis is None or not redis.is_running():
                    return usable_ports(settings.options.host, settings.ports)
            except CliError as exc:
                if last or isinstance(exc, UsageError):
                    raise
            if not reported:
                self._report("waiting for the parts of an earlier run to end")
                reported = True
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
            await cancel_and_discard(*waits)

    async def _answering(self, urls: Sequence[str], stop: asyncio.Event, parts: Sequence[Forked]) -> None:
        """Wait until /readyz returns 200 everywhere, a part dies at its start, or the user stops it."""
        failures = [asyncio.ensure_future(part.died()) for part in parts]
        waits = [
            asyncio.ensure_future(all_ready(urls, self._report, _pinned(self._settings.options.tls_cert))),
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
                    f"{' or '.join(urls)}: /readyz has not returned 200 within {READY_TIMEOUT_S:g} s:\n"
                    f"{tail(self._logs / 'gateway.log')}"
                )
        finally:
            await cancel_and_discard(*waits)

    def _announce(self, urls: Sequence[str]) -> None:
        if self._ready_fd is not None:
            self._report(READY)
            os.close(self._ready_fd)
        else:
            announce(self._settings, urls)
            note("Stop it with Ctrl-C.")


async def answering_redis(url: str, options: Options) -> None:
    """Return if a Redis responds at `url`. Raises CliError."""
    try:
        password = redis_password(options.redis_password_file, os.environ)
        tls = tls_settings(options).redis
        async with RedisState.connect(url, password=password, timeout_s=2.0, tls=tls) as state:
            await state.ping()
    except StateFull as exc:
        note(f"{exc}; requests are refused until then")
    except RegistryError as exc:
        raise CliError(f"--redis-url: {exc}") from exc


async def until_stopped(stop: asyncio.Event, parts: Sequence[Child | Forked]) -> None:
    """Return once `stop` is set. Raises CliError if a part is no longer restarted when it dies."""
    stopped = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait([stopped, *(part.keeper for part in parts)], return_when=asyncio.FIRST_COMPLETED)
    finally:
        await cancel_and_wait(stopped)
    for part in parts:
        if part.keeper.done() and not stop.is_set():
            exc = part.keeper.exception()
            logger.error("%s is no longer supervised", part.name, exc_info=exc)
            raise CliError(f"{part.name} cannot be kept running: {exc!r}")


async def force_each_second(
    force: Callable[[], None], *, every_s: float = FORCE_S, slow_s: float = SLOW_FORCE_S
) -> None:
    """Force what Redis wrote to the disk about every second, until cancelled; `force` blocks."""
    failing = ""
    slow = False

    def warn() -> None:
        nonlocal slow
        if not slow:
            logger.warning("fsync of the Redis log takes more than %g s", slow_s)
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
                logger.error("fsync of the Redis log failed: %s", exc)
        else:
            failing = ""
        finally:
            warning.cancel()
        if time.monotonic() - began_s < slow_s:
            slow = False


async def all_ready(
    urls: Sequence[str], report: Callable[[str], None], tls: ssl.SSLContext | bool = True
) -> None:
    """Return once every gateway and the nodes are ready; `report` receives what the first waits for."""
    async with asyncio.TaskGroup() as group:
        for index, url in enumerate(urls):
            group.create_task(ready(url, report if index == 0 else lambda _: None, tls))


def _pinned(cert: Path | None) -> ssl.SSLContext | bool:
    """Return what trusts this certificate alone, by whatever name its gateways are reached."""
    if cert is None:
        return True
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.load_verify_locations(cert)
    return context


async def ready(url: str, report: Callable[[str], None], tls: ssl.SSLContext | bool = True) -> None:
    """Return once the gateway and its nodes are ready; `report` receives what it waits for."""
    wait_s = 0.02
    reported = ""
    async with httpx2.AsyncClient(trust_env=False, timeout=5.0, verify=tls) as http:
        while True:
            with contextlib.suppress(httpx2.HTTPError, ValueError):
                response = await http.get(f"{url}/readyz")
                if response.status_code == 200:
                    return
                reasons = ", ".join(response.json().get("reasons", ()))
                if reasons != reported:
                    reported = reasons
                    report(f"waiting: {reasons}")
            await asyncio.sleep(wait_s)
            wait_s = min(0.1, wait_s * 1.5)


def plural(count: int, noun: str) -> str:
    """Return a count with its noun."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


@contextlib.contextmanager
def lock(data_dir: Path) -> Iterator[None]:
    """Lock the data directory for this process. Raises CliError."""
    with (data_dir / "up.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as exc:
            raise CliError(f"another `hypercast up` uses {data_dir}") from exc
        yield


def gateway_names(count: int) -> list[str]:
    """Return the names of the gateways: of their logs, and in the cluster."""
    return ["gateway", *(f"gateway-{index}" for index in range(1, count))]


def zygote(program: str) -> Sequence[str]:
    """Return the command of the zygote that forks a program."""
    return *module_command("cli.supervise.zygote"), program


def arguments(options: Options) -> list[str]:
    """Return the arguments of a gateway or a node."""
    return [JSON_FLAG, encode_options(options)]
