"""The lag of an event loop: how much later than due it runs what is due."""

import asyncio
import gc
import logging
import sys
import time
from collections.abc import Callable

_PERIOD_S = 0.05
_LONG_S = 0.1
_LOG_EVERY_S = 10.0
_GIL_SWITCH_INTERVAL_S = 0.0005
# A young collection looks at some 30,000 objects at most, 10 ms; with (20_000, 20, 10) those were 400,000,
# and the loop was held up for 250 ms on a busy machine. A full one comes after 8 million: cycles are rare.
_COLLECT_AFTER = (10_000, 1, 400)


def limit_loop_lag() -> None:
    """Set up the interpreter of a process whose event loop answers while large requests are worked on.

    Call it once everything is imported: the garbage collector does not look at objects of before.
    """
    gc.freeze()
    gc.set_threshold(*_COLLECT_AFTER)
    # By default a thread that runs Python (a chat's template, an engine) delays the loop by 5 ms a switch.
    sys.setswitchinterval(_GIL_SWITCH_INTERVAL_S)


async def watch_loop_lag(log: logging.Logger, observe: Callable[[float], None] | None = None) -> None:
    """Measure the lag every 50 ms until cancelled; pass each to `observe`, and log those over 100 ms.

    There is at most one log line in 10 s, which counts those since the last.
    """
    count, longest_s, quiet_until_s = 0, 0.0, 0.0
    while True:
        due_s = time.monotonic() + _PERIOD_S
        await asyncio.sleep(_PERIOD_S)
        now_s = time.monotonic()  # uvloop's own time is that of the turn's begin
        lag_s = max(0.0, now_s - due_s)
        if observe is not None:
            observe(lag_s)
        if lag_s > _LONG_S:
            count, longest_s = count + 1, max(longest_s, lag_s)
        if count and now_s >= quiet_until_s:
            log.warning("the event loop was held up %d times, for up to %.0f ms", count, longest_s * 1000)
            count, longest_s, quiet_until_s = 0, 0.0, now_s + _LOG_EVERY_S
