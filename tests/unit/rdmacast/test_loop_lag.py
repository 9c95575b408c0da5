"""The watchdog of the event loop."""

import asyncio
import logging
import time

import pytest

from rdmacast.aio.loop_lag import watch_loop_lag
from tests.fixtures.patience import until


async def test_long_turns_are_measured_and_logged_at_a_bounded_rate(
    caplog: pytest.LogCaptureFixture,
) -> None:
    lags: list[float] = []
    log = logging.getLogger("test")
    watching = asyncio.create_task(watch_loop_lag(log, lags.append))
    for _ in range(3):
        before = len(lags)
        await asyncio.sleep(0)
        time.sleep(0.3)  # noqa: ASYNC251  (a turn that takes long)
        await until(lambda: len(lags) > before)  # noqa: B023
    watching.cancel()
    assert sum(lag > 0.2 for lag in lags) == 3
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "held up 1 times, for up to" in caplog.text
