"""The watchdog of the event loop."""

import asyncio
import json
import logging
import subprocess
import sys
import time

import pytest

from rdmacast.aio.loop_lag import watch_loop_lag
from tests.fixtures.patience import until

_LARGE_REQUEST = """
import gc, json
from rdmacast.aio.loop_lag import limit_loop_lag

looked_at = []
def begin(phase, info):
    if phase == "start":
        looked_at.append(sum(len(gc.get_objects(generation)) for generation in range(info["generation"] + 1)))

limit_loop_lag()
gc.callbacks.append(begin)
kept = [[] for _ in range(1_000_000)]
print(json.dumps(looked_at))
"""


def test_no_collection_looks_at_many_objects_while_a_large_request_is_worked_on() -> None:
    ran = subprocess.run((sys.executable, "-c", _LARGE_REQUEST), capture_output=True, text=True, check=True)
    looked_at = json.loads(ran.stdout)
    assert len(looked_at) >= 90
    assert max(looked_at) < 50_000


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
