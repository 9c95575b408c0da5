"""Large requests of a tenant on a running platform: the gateway answers, keeps its nodes and its lease."""

import json
import re
import subprocess
import sys
from subprocess import PIPE, Popen

from tests.fixtures import tenant_client
from tests.fixtures.patience import PATIENCE_S
from tests.fixtures.platform import Platform

LONGEST_S = 0.25
KINDS = ("refused", "tools", "prompts", "logprobs")
# What a gateway and its nodes log when the other is silent, or the lease is lost.
LOST = re.compile("peer was silent|channel closed|controller epoch|Redis is unavailable")


def lost(platform: Platform) -> int:
    logs = (platform.data / "logs").glob("*.log")
    return sum(len(LOST.findall(log.read_text(errors="replace"))) for log in logs)


def longest_wait_s(platform: Platform, key: str) -> float:
    client = (sys.executable, "-S", tenant_client.__file__)
    gateway = str(platform.process("gateway").pid)
    with Popen((*client, "live", platform.url, key, gateway), stdin=PIPE, stdout=PIPE, text=True) as probe:
        assert probe.stdout is not None and probe.stdout.readline() == "ready\n"
        attackers = [Popen((*client, kind, platform.url, key, "victim"), stdout=PIPE) for kind in KINDS]
        for one in attackers:
            statuses = json.loads(one.communicate(timeout=PATIENCE_S)[0])
            assert set(statuses) <= {200, 400}, statuses
        try:
            return float(json.loads(probe.communicate("", timeout=PATIENCE_S)[0])["livez"])
        except subprocess.TimeoutExpired:
            probe.kill()
            raise


def test_the_gateway_answers_and_keeps_its_nodes_and_its_lease(platform: Platform) -> None:
    platform.run("deploy", "functions/tiny-coder", "--name", "victim", "--keep-alive", "10m")
    made = platform.json("keys", "create", "--tenant", "hostile")
    before = lost(platform)
    assert longest_wait_s(platform, made["key"]) < LONGEST_S
    assert lost(platform) == before
