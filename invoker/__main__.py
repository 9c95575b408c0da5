"""`python -m invoker`: run one node."""

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence

import uvloop
from setproctitle import setproctitle

from invoker.base.errors import InvokerError, SettingsError
from invoker.emulated.engines import EmulatedEngineFactory
from invoker.engine.factory import EngineFactory, TorchEngineFactory
from invoker.lifetime import run_node
from invoker.loading.loader import LoadSources
from invoker.settings import Settings, parse_settings
from rdmacast.aio.loop_lag import limit_loop_lag
from registry.config.emulation import is_emulated, parse_device
from registry.errors import RegistryError
from registry.logs.lines import configure_logs
from registry.redis.state import RedisState

USAGE_ERROR = 2

log = logging.getLogger("invoker")


def main(
    argv: Sequence[str],
    engines: Callable[[str], EngineFactory] | None = None,
    limit_sources: Callable[[LoadSources], LoadSources] = lambda sources: sources,
) -> int:
    """Run the node, by default with the engines for its device, and return the process's exit code."""
    os.umask(0o077)
    try:
        settings = parse_settings(argv, os.environ)
    except SettingsError as error:
        print(f"invoker: {error}", file=sys.stderr)
        return USAGE_ERROR
    configure_logs(settings.log_level, settings.log_format, settings.node_id, shows_process=True)
    logging.getLogger("httpx2").setLevel(logging.WARNING)  # a line for each request to vLLM
    limit_loop_lag()
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_run(settings, (engines or engines_for)(settings.device), limit_sources))
    except (InvokerError, RegistryError, OSError) as error:
        log.error("node %s: exiting: %s", settings.node_id, error)
        return 1
    return 0


def engines_for(device: str) -> EngineFactory:
    """Return the engine factory for a device."""
    return EmulatedEngineFactory(parse_device(device)) if is_emulated(device) else TorchEngineFactory()


async def _run(
    settings: Settings, engines: EngineFactory, limit_sources: Callable[[LoadSources], LoadSources]
) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal(number: int) -> None:
        if stop.is_set():
            log.warning("second signal %d: exiting immediately", number)
            os._exit(128 + number)
        log.info("signal %d: shutting down", number)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    async with RedisState.connect(
        settings.redis_url,
        password=settings.redis_password,
        wait_replicas=settings.redis_wait_replicas,
        tls=settings.tls.redis,
    ) as state:
        await run_node(settings, state, engines, stop, limit_sources=limit_sources)


if __name__ == "__main__":
    setproctitle("hypercast node")
    sys.exit(main(sys.argv[1:]))
