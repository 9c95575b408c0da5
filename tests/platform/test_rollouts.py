"""Rollouts on a real platform of two gateways and two nodes, under load."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx2
import pytest

from benchmarks.harness.local_platform import RunningPlatform
from invoker.handlers.confine import DEFAULT_SANDBOX
from tests.fixtures.patience import until
from tests.fixtures.platform import Platform

YAML = "name: answer\nhandler: handler.py:handle\nscaling: {keep_alive: 1h, target_concurrency: 32}\n"
GOOD = "def handle(request):\n    return {'text': 'TEXT'}\n"
FAILS = "def handle(request):\n    raise ValueError('a bad release')\n"
DOES_NOT_START = "raise RuntimeError('a missing module')\n"
ROLLED_BACK_WITHIN_S = 30.0
CLIENTS = 8
PAUSE_S = 0.02  # of a client between two requests: some 200 requests a second are enough


@pytest.fixture(scope="module")
def platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    flags = ("--nodes", "2", "--gateways", "2", "--device", "cpu", "--allow-handlers")
    if DEFAULT_SANDBOX.missing():
        flags = (*flags, "--allow-unconfined-handlers")
    made = Platform(data=tmp_path_factory.mktemp("rollouts") / "data", flags=flags)
    made.up()
    try:
        yield made
    finally:
        made.down()


def write(folder: Path, code: str) -> str:
    folder.mkdir()
    (folder / "function.yaml").write_text(YAML)
    (folder / "handler.py").write_text(code)
    return str(folder)


@dataclass
class Answers:
    """The answers to all requests: what each said, or its status, in order."""

    seen: list[str] = field(default_factory=list)
    statuses: list[int] = field(default_factory=list)

    @property
    def failed(self) -> int:
        return sum(status != 200 for status in self.statuses)


async def under_load(platform: Platform, work: Callable[[Answers], Awaitable[None]]) -> Answers:
    """Run `work` while clients of both gateways make requests, one after the other."""
    answers, urls = Answers(), RunningPlatform.of(platform.data).urls
    assert len(urls) == 2
    over = asyncio.Event()

    async def client(url: str) -> None:
        headers = {"authorization": f"Bearer {platform.key}"}
        async with httpx2.AsyncClient(base_url=url, headers=headers, timeout=60, trust_env=False) as http:
            while not over.is_set():
                answer = await http.post("/functions/answer/invoke", json={})
                answers.statuses.append(answer.status_code)
                answers.seen.append(answer.json().get("text", ""))
                await asyncio.sleep(PAUSE_S)  # a load of people, not a flood on two cores

    async with asyncio.TaskGroup() as group:
        for number in range(CLIENTS):
            group.create_task(client(urls[number % 2]))
        try:
            await work(answers)
        finally:
            over.set()
    return answers


def test_a_bad_version_is_rolled_back_and_only_its_share_fails(platform: Platform, tmp_path: Path) -> None:
    platform.run("deploy", write(tmp_path / "one", GOOD.replace("TEXT", "one")))
    made = platform.json("deploy", write(tmp_path / "bad", FAILS), "--no-traffic")
    assert made["version"] == 2 and made["previous_version"] == 1
    took_s, before, share, after = 0.0, 0, 0, 0

    async def roll_out(answers: Answers) -> None:
        nonlocal took_s, before, share, after
        await until(lambda: len(answers.seen) > 200)
        before = answers.failed
        at = len(answers.seen)
        began_s = time.monotonic()
        await asyncio.to_thread(platform.run, "rollout", "answer", "--to", "2", "--percent", "10")
        await asyncio.to_thread(
            platform.until,
            "it is rolled back",
            lambda: platform.get("/admin/functions/answer/rollout")["state"] == "rolled_back",
        )
        took_s = time.monotonic() - began_s
        share = len(answers.seen) - at
        failed = answers.failed
        at = len(answers.seen)
        await until(lambda: len(answers.seen) > at + 400)
        after = answers.failed - failed

    answers = asyncio.run(under_load(platform, roll_out))
    shown = platform.get("/admin/functions/answer/rollout")
    print(f"rolled back after {took_s:.1f} s, {answers.failed} of {share} failed: {shown['reason']}")
    assert took_s < ROLLED_BACK_WITHIN_S
    assert before == 0
    # What was on its way to it when it was rolled back, at either gateway, is of its share, too.
    assert after <= CLIENTS
    assert 0 < answers.failed <= 0.1 * share + 4 * (0.09 * share) ** 0.5 + CLIENTS
    assert set(answers.seen) == {"one", ""} and set(answers.statuses) == {200, 500}
    assert "requests failed in 60 s" in shown["reason"]
    log = platform.json("audit")
    assert "rollout.rollback" in {one["operation"] for one in log}
    assert platform.json("describe", "answer")["current"]["version"] == 1
    platform.until(
        "its instances end", lambda: {one["version"] for one in platform.instances("answer")} == {1}
    )


def test_a_good_version_takes_over_step_by_step_without_a_failure(platform: Platform, tmp_path: Path) -> None:
    made = platform.json("deploy", write(tmp_path / "two", GOOD.replace("TEXT", "two")), "--no-traffic")
    steps = ("--steps", "10,50,100", "--every", "1s", "--wait")

    async def roll_out(answers: Answers) -> None:
        await until(lambda: len(answers.seen) > 50)
        await asyncio.to_thread(platform.run, "rollout", "answer", "--to", str(made["version"]), *steps)
        await asyncio.to_thread(
            platform.until,
            "it is promoted",
            lambda: platform.get("/admin/functions/answer/rollout")["state"] == "promoted",
        )
        await until(lambda: set(answers.seen[-50:]) == {"two"})

    answers = asyncio.run(under_load(platform, roll_out))
    assert set(answers.statuses) == {200}
    first, last = answers.seen.index("two"), len(answers.seen) - answers.seen[::-1].index("one")
    assert set(answers.seen[first:last]) == {"one", "two"}  # both for a while
    assert platform.json("describe", "answer")["current"]["version"] == made["version"]


def test_a_deploy_waits_for_health_or_leaves_all_as_it_is(platform: Platform, tmp_path: Path) -> None:
    before = platform.json("describe", "answer")["current"]["version"]

    async def deploys(answers: Answers) -> None:
        await until(lambda: len(answers.seen) > 50)
        bad = write(tmp_path / "none", DOES_NOT_START)
        refused = await asyncio.to_thread(platform.run, "deploy", bad, "--wait-healthy", check=False)
        assert refused.returncode == 5 and "starts in a row failed" in refused.stderr, refused.stderr
        assert "the handler cannot be loaded: RuntimeError" in refused.stderr
        shown = await asyncio.to_thread(platform.json, "describe", "answer")
        assert shown["current"]["version"] == before
        good = write(tmp_path / "three", GOOD.replace("TEXT", "three"))
        await asyncio.to_thread(platform.run, "deploy", good, "--wait-healthy")
        await until(lambda: set(answers.seen[-50:]) == {"three"})

    answers = asyncio.run(under_load(platform, deploys))
    assert set(answers.statuses) == {200}


def test_a_slow_version_is_rolled_back_by_its_time_to_first_token(tmp_path: Path) -> None:
    flags = ("--nodes", "2", "--hosts", "2", "--device", "emulated:h800/1000/10")
    slow = Platform(data=tmp_path / "data", flags=flags)
    slow.up()

    async def roll_out() -> None:
        headers = {"authorization": f"Bearer {slow.key}"}
        body = {"model": "model", "prompt": [5] * 512, "max_tokens": 2, "ignore_eos": True}
        over = asyncio.Event()

        async def client() -> None:
            async with httpx2.AsyncClient(base_url=slow.url, headers=headers, timeout=60) as http:
                while not over.is_set():
                    answer = await http.post("/v1/completions", json=body)
                    assert answer.status_code == 200, answer.text

        async with asyncio.TaskGroup() as group:
            for _ in range(2):
                group.create_task(client())
            try:
                limits = ("--percent", "50", "--max-ttft-ratio", "1.2", "--wait")
                await asyncio.to_thread(slow.run, "rollout", "model", "--to", "2", *limits)
                await asyncio.to_thread(
                    slow.until,
                    "it is rolled back",
                    lambda: slow.get("/admin/functions/model/rollout")["state"] == "rolled_back",
                )
            finally:
                over.set()

    try:
        deploy = ("--name", "model", "--min-instances", "1", "--max-instances", "1")
        slow.run("deploy", "emulated:llama2-7b/1000", *deploy)
        slow.run("deploy", "emulated:llama2-13b/1000", *deploy, "--no-traffic")
        asyncio.run(roll_out())
        shown = slow.get("/admin/functions/model/rollout")
        print(shown["reason"])
        assert "the mean time to the first token of" in shown["reason"]
    finally:
        slow.down()
