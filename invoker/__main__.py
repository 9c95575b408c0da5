"""`python -m invoker`: run one node."""

import asyncio
import gc
import logging
import os
import signal
import sys
from collections.abc import Sequence

import uvloop

from invoker.assembly import run_node
from invoker.emulated.engines import EmulatedEngines
from invoker.engines import Engines, RealEngines
from invoker.errors import InvokerError, SettingsError
from invoker.settings import Settings, parse_settings
from registry.emulation import is_emulated, parse_device
from registry.errors import RegistryError
from registry.redis_state import RedisState

USAGE_ERROR = 2
_GIL_TURN_S = 0.0005

log = logging.getLogger("invoker")


def main(argv: Sequence[str]) -> int:
    """Run the node; returns the process's exit code."""
    try:
        settings = parse_settings(argv, os.environ)
    except SettingsError as error:
        print(f"invoker: {error}", file=sys.stderr)
        return USAGE_ERROR
    logging.basicConfig(
        level=settings.log_level.upper(),
        format=f"%(asctime)s %(levelname)s {settings.node_id} %(name)s: %(message)s",
        stream=sys.stderr,
        force=True,
    )
    # Calls make objects that soon go by themselves: to search for cycles after every 700 is a waste.
    gc.set_threshold(20_000, 20, 50)
    # An engine's thread kept the loop waiting for 5 ms at each turn, and a switch is a chain of turns.
    sys.setswitchinterval(_GIL_TURN_S)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_run(settings))
    except (InvokerError, RegistryError, OSError) as error:
        log.error("node %s ends: %s", settings.node_id, error)
        return 1
    return 0


def engines_for(device: str) -> Engines:
    """What runs models on such a device."""
    return EmulatedEngines(parse_device(device)) if is_emulated(device) else RealEngines()


async def _run(settings: Settings) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal(number: int) -> None:
        if stop.is_set():
            log.warning("signal %d again: leaving at once", number)
            os._exit(128 + number)
        log.info("signal %d: leaving", number)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    async with RedisState.connect(settings.redis_url) as state:
        await run_node(settings, state, engines_for(settings.device), stop)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
