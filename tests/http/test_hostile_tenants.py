"""A tenant whose requests take long delays no other: its stream and /livez go on, over real sockets."""

import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from subprocess import PIPE, Popen

import pytest

from tests.fixtures import tenant_client
from tests.fixtures.patience import PATIENCE_S

LONGEST_S = 0.25
SERVED = ("prompts", "embeddings", "logprobs")  # the others are refused
BUCKET = 'hypercast_event_loop_lag_seconds_bucket{le="0.25"}'
COUNT = "hypercast_event_loop_lag_seconds_count"


@contextmanager
def running(*command: str) -> Iterator[Popen[str]]:
    """Start a process that ends with its input."""
    with Popen((sys.executable, *command), stdin=PIPE, stdout=PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def measure(*kinds: str) -> tuple[dict[str, list[int]], dict[str, float]]:
    """Return the statuses of attacks that run at once, and another tenant's longest waits meanwhile.

    `late turns` counts those of the event loop that were late by more than `LONGEST_S`.
    """
    with running("-m", "tests.fixtures.busy_gateway") as server:
        assert server.stdout is not None
        at = json.loads(server.stdout.readline())
        client = ("-S", tenant_client.__file__)
        with running(*client, "probe", at["url"], at["admin"]) as probe:
            assert probe.stdout is not None
            assert probe.stdout.readline() == "ready\n"
            attackers = [
                subprocess.Popen((sys.executable, *client, kind, at["url"], at["caller"]), stdout=PIPE)
                for kind in kinds
            ]
            statuses = {
                kind: json.loads(one.communicate(timeout=PATIENCE_S)[0])
                for kind, one in zip(kinds, attackers, strict=True)
            }
            longest = json.loads(probe.communicate("", timeout=PATIENCE_S)[0])
        with urllib.request.urlopen(f"{at['url']}/metrics") as response:
            values = dict(line.rsplit(" ", 1) for line in response.read().decode().splitlines())
        longest["late turns"] = float(values[COUNT]) - float(values[BUCKET])
        return statuses, longest


@pytest.mark.parametrize("kinds", [*[(kind,) for kind in tenant_client.ATTACKS], (*tenant_client.ATTACKS,)])
def test_large_requests_hold_up_no_other_tenant(kinds: tuple[str, ...]) -> None:
    for _ in range(3):  # another process may take the cores for a moment; what blocks does so each time
        statuses, longest = measure(*kinds)
        if max(longest.values()) < LONGEST_S:
            break
    assert max(longest.values()) < LONGEST_S, longest
    assert statuses == {kind: [200 if kind in SERVED else 400] * 2 for kind in kinds}
