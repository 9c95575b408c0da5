"""Notices an engine that hangs: its thread cannot be ended, so its process has to be."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

log = logging.getLogger("invoker.watchdog")


async def watch_steps(
    longest_step_us: Callable[[], int], limit_s: float, give_up: Callable[[], Awaitable[None]]
) -> None:
    """Call `give_up` once a step has been under way for `limit_s`, and return.

    It must be seen twice: a process that was stopped as a whole gets the time to end its step.
    """
    pause_s, overdue = min(5.0, limit_s / 4), False
    while True:
        await asyncio.sleep(pause_s)
        step_s = longest_step_us() / 1e6
        if overdue and step_s > limit_s:
            log.critical("an engine hangs: its step has been running for %.0f s (--step-timeout)", step_s)
            await give_up()
            return
        overdue = step_s > limit_s
