"""Ends the process when an engine hangs, since its thread cannot be ended."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

log = logging.getLogger("invoker.watchdog")


async def watch_steps(
    longest_step_us: Callable[[], int], limit_s: float, abort: Callable[[], Awaitable[None]]
) -> None:
    """Call `abort` once a step has been running for `limit_s`, and return.

    It must be observed twice, so that a process that was stopped as a whole has time to end its step.
    """
    pause_s, overdue = min(5.0, limit_s / 4), False
    while True:
        await asyncio.sleep(pause_s)
        step_s = longest_step_us() / 1e6
        if overdue and step_s > limit_s:
            log.critical("engine hangs: a step has been running for %.0f s (--step-timeout)", step_s)
            await abort()
            return
        overdue = step_s > limit_s
