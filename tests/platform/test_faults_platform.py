"""Two gateways and two nodes, of which one at a time is killed, hangs, or is asked to stop, under load."""

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx2
import psutil
import pytest

from registry import keys
from registry.channel.client import Channel
from registry.messages.node import GetStatus, NodeStatus
from registry.records.usage import RequestRecord
from registry.redis.state import RedisState
from registry.state import UsageFilter
from tests.fixtures.platform import COMMAND_S, Platform
from tests.fixtures.tls import NO_AUTHORITY

TOKENS, LONG = 160, 900
IDLE_US = 1_000_000  # of a node, beyond any pause between two steps of a sequence
PROMPTS = ("def add(", "class Tree:", "import os", "for i in ")
# Bounds are wide for a machine that does other things as well; what an idle one takes is in
# docs/OPERATIONS.md.
BACK_S = 60.0


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, root: Path) -> Iterator[Platform]:
    made = Platform(data=tmp_path_factory.mktemp("pair"), flags=("--nodes", "2", "--gateways", "2"))
    made.up()
    try:
        made.run("deploy", str(root / "functions" / "tiny-coder"), "--name", "coder", "--min-instances", "2")
        settled(made)
        yield made
    finally:
        made.down()


def settled(pair: Platform) -> None:
    """Wait until every part is there again: a test begins where the one before it left nothing open."""

    def whole() -> bool:
        ready = [i["node"] for i in pair.instances("coder") if i["state"] == "ready"]
        return len(set(ready)) == 2 and all(answers(url, pair.key) for url in urls(pair))

    pair.until("both nodes and both gateways serve", lambda: safely(whole))


def safely(holds: Callable[[], bool]) -> bool:
    try:
        return holds()
    except (httpx2.HTTPError, AssertionError):
        return False


def urls(pair: Platform) -> list[str]:
    return list(json.loads((pair.data / "up.json").read_text())["urls"])


def supervisor(pair: Platform) -> psutil.Process:
    return psutil.Process(json.loads((pair.data / "up.json").read_text())["pid"])


def leader(pair: Platform) -> tuple[str, int]:
    """Return the gateway that holds the controller's lease, "" for none, and the latest epoch."""

    async def ask() -> tuple[str, int]:
        async with RedisState.connect(f"unix://{pair.data / 'redis.sock'}") as state:
            holder = await state._redis.call("HGET", keys.lease("controller"), "holder")
            epoch = await state._redis.call("HGET", keys.LEASE_EPOCHS, "controller")
            return (holder or b"").decode(), int(epoch)

    return asyncio.run(ask())


@contextmanager
def stopped(process: psutil.Process) -> Iterator[None]:
    """Yield a process that hangs: its connections stay open and nothing comes."""
    process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        process.send_signal(signal.SIGCONT)


def answers(url: str, key: str) -> bool:
    return ask(url, key)[0] == 200


def ask(url: str, key: str, timeout_s: float = COMMAND_S) -> tuple[int, str, float]:
    """Return a short completion: its status (0: no answer), Retry-After, and how long that took."""
    began = time.monotonic()
    try:
        response = httpx2.post(
            f"{url}/v1/completions",
            json={"model": "coder", "prompt": "def f(", "max_tokens": 2, "ignore_eos": True},
            headers={"authorization": f"Bearer {key}"},
            timeout=timeout_s,
            trust_env=False,
            verify=NO_AUTHORITY,
        )
    except httpx2.TransportError:
        return 0, "", time.monotonic() - began
    return response.status_code, response.headers.get("retry-after", ""), time.monotonic() - began


@dataclass
class Stream:
    """A completion as its caller saw it."""

    prompt: str
    tokens: int = TOKENS
    request_id: str = ""
    ids: list[int] = field(default_factory=list)
    error: str = ""
    longest_gap_s: float = 0.0
    started: asyncio.Event = field(default_factory=asyncio.Event)
    over: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self, url: str, key: str) -> None:
        body = {
            "model": "coder",
            "prompt": self.prompt,
            "max_tokens": self.tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": True,
        }
        headers = {"authorization": f"Bearer {key}"}
        try:
            async with (
                httpx2.AsyncClient(timeout=COMMAND_S, trust_env=False, verify=NO_AUTHORITY) as http,
                http.stream("POST", f"{url}/v1/completions", json=body, headers=headers) as response,
            ):
                self.request_id = response.headers["x-request-id"]
                if response.status_code != 200:
                    self.error = f"{response.status_code}"
                    return
                last = time.monotonic()
                async for line in response.aiter_lines():
                    if not line.startswith("data: {"):
                        continue
                    self.longest_gap_s = max(self.longest_gap_s, time.monotonic() - last)
                    last = time.monotonic()
                    event = json.loads(line.removeprefix("data: "))
                    if "error" in event:
                        self.error = event["error"]["code"]
                        return
                    for choice in event["choices"]:
                        self.ids += choice.get("token_ids") or []
                    if len(self.ids) > 5:
                        self.started.set()
        except httpx2.TransportError as error:
            self.error = type(error).__name__
        finally:
            self.started.set()
            self.over.set()


@asynccontextmanager
async def streams(pair: Platform, *at: str, lost: str = "") -> AsyncIterator[list[Stream]]:
    """Yield a stream of each prompt from each address: running at the beginning, complete at the end.

    Those of `lost` never complete: they are long enough for a slow reader.
    """
    made = [(Stream(prompt, LONG if url == lost else TOKENS), url) for url in at for prompt in PROMPTS]
    async with asyncio.TaskGroup() as group:
        for stream, url in made:
            group.create_task(stream.run(url, pair.key))
        for stream, _ in made:
            await stream.started.wait()
        yield [stream for stream, _ in made]


def expected(pair: Platform) -> dict[str, list[int]]:
    """Return what each prompt gives when nothing fails."""

    async def main() -> dict[str, list[int]]:
        async with streams(pair, pair.url) as made:
            pass
        return {stream.prompt: stream.ids for stream in made}

    ids = asyncio.run(main())
    assert all(len(tokens) == TOKENS for tokens in ids.values())
    return ids


def check_bill(pair: Platform, made: list[Stream]) -> None:
    """Exactly one record of each whole stream."""

    async def bill() -> list[RequestRecord]:
        async with RedisState.connect(f"unix://{pair.data / 'redis.sock'}") as state:
            return (await state.requests(UsageFilter(), limit=100_000))[0]

    rows = asyncio.run(bill())
    for stream in made:
        mine = [row.completion_tokens for row in rows if row.request_id.startswith(stream.request_id)]
        assert mine == [TOKENS], stream


def test_a_node_that_hangs_is_left_in_seconds_and_rejoins(pair: Platform):
    wanted = expected(pair)
    before = {node["id"]: (node["pid"], node["epoch"]) for node in pair.nodes()}

    async def main() -> list[Stream]:
        async with streams(pair, *urls(pair)) as made:
            with stopped(psutil.Process(before["node-0"][0])):
                await asyncio.gather(*(stream.over.wait() for stream in made))
        return made

    made = asyncio.run(main())
    for stream in made:
        assert (stream.error, stream.ids) == ("", wanted[stream.prompt])
        assert stream.longest_gap_s < 3.5 + BACK_S
    settled(pair)
    assert {node["id"]: (node["pid"], node["epoch"]) for node in pair.nodes()} == before
    check_bill(pair, made)


def test_another_gateway_leads_when_one_hangs_which_finishes_its_streams_when_it_wakes(pair: Platform):
    settled(pair)
    wanted = expected(pair)
    name, epoch = leader(pair)
    index = ["gateway", "gateway-1"].index(name)

    def another_leads() -> bool:
        return leader(pair)[0] not in ("", name)

    def given_up() -> bool:
        logs = [(pair.data / "logs" / f"node-{n}.log").read_text() for n in range(2)]
        return all("the peer was silent for 3 s" in log for log in logs)

    async def main() -> list[Stream]:
        async with streams(pair, urls(pair)[index]) as made:
            with stopped(pair.process(name)):
                await asyncio.to_thread(pair.until, "another leads", another_leads, 3 + BACK_S)
                assert await asyncio.to_thread(answers, urls(pair)[1 - index], pair.key)
                await asyncio.to_thread(pair.until, "the nodes give the silent one up", given_up, 4 + BACK_S)
        return made

    made = asyncio.run(main())
    assert leader(pair)[1] > epoch
    for stream in made:
        assert (stream.error, stream.ids) == ("", wanted[stream.prompt])
    check_bill(pair, made)


def test_a_killed_gateway_costs_its_own_streams_and_nobody_elses(pair: Platform):
    settled(pair)
    wanted = expected(pair)
    name, epoch = leader(pair)
    index = ["gateway", "gateway-1"].index(name)
    mine, other = urls(pair)[index], urls(pair)[1 - index]

    async def main() -> tuple[list[Stream], list[Stream]]:
        async with streams(pair, mine, other, lost=mine) as made:
            pair.process(name).kill()
        return made[: len(PROMPTS)], made[len(PROMPTS) :]

    lost, kept = asyncio.run(main())
    assert all(stream.error and len(stream.ids) < LONG for stream in lost)
    for stream in kept:
        assert (stream.error, stream.ids) == ("", wanted[stream.prompt])
    check_bill(pair, kept)
    pair.until("the killed gateway answers again", lambda: answers(mine, pair.key), 5 + BACK_S)
    pair.until("somebody leads", lambda: leader(pair)[0], 3 + BACK_S)
    assert leader(pair)[1] >= epoch

    last = asyncio.run(counters(pair))

    def quiet() -> bool:
        nonlocal last
        now = asyncio.run(counters(pair))
        if any(node["busy_us"] != was["busy_us"] for node, was in zip(now, last, strict=True)):
            last = now
        return all(node["idle_us"] - was["idle_us"] > IDLE_US for node, was in zip(now, last, strict=True))

    pair.until("the nodes have let go of the sequences of the dead gateway", quiet)


async def counters(pair: Platform) -> list[Mapping[str, int]]:
    """Return what each node says of itself now."""
    secret, found = (pair.data / "cluster.secret").read_bytes().strip(), []
    async with RedisState.connect(f"unix://{pair.data / 'redis.sock'}") as state:
        up = (await state.snapshot()).nodes
    for node in sorted((live.record for live in up), key=lambda record: record.id):
        channel = await Channel.connect(node.channel, secret)
        status = await channel.ask(GetStatus())
        assert isinstance(status, NodeStatus)
        found.append(status.record.counters)
        await channel.aclose()
    return found


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_without_redis_requests_are_refused_at_once_and_served_soon_after(
    pair: Platform, how: signal.Signals
):
    settled(pair)
    wanted = expected(pair)

    async def main() -> list[Stream]:
        async with streams(pair, *urls(pair)) as made:
            with stopped(supervisor(pair)):  # so that Redis stays away
                redis = pair.process("redis")
                redis.send_signal(how)
                refused = 0
                while refused < 4 or not all(stream.over.is_set() for stream in made):
                    for url in urls(pair):
                        status, retry_after, took_s = await asyncio.to_thread(ask, url, pair.key)
                        assert took_s < 3 + BACK_S, "a hang"
                        if status == 503:
                            assert 1 <= int(retry_after) <= 5
                            refused += 1
                        assert status in (200, 503)
                if how == signal.SIGSTOP:
                    redis.send_signal(signal.SIGCONT)
        return made

    made = asyncio.run(main())
    began = time.monotonic()
    for url in urls(pair):
        pair.until("it serves again", lambda url=url: answers(url, pair.key), 5 + BACK_S)
    print(f"served again {time.monotonic() - began:.2f} s after the supervisor could start Redis")
    for stream in made:
        assert stream.ids == wanted[stream.prompt][: len(stream.ids)]
        assert stream.error in ("", "billing_failed", "state_unavailable")
    check_bill(pair, [stream for stream in made if not stream.error])


def test_a_gateway_and_a_node_that_are_told_to_go_fail_no_request(pair: Platform):
    settled(pair)
    mine, other = urls(pair)
    seen: list[tuple[int, str]] = []

    async def main() -> list[Stream]:
        over = asyncio.Event()

        async def load(url: str) -> None:
            while not over.is_set():
                status, _, _ = await asyncio.to_thread(ask, url, pair.key)
                seen.append((status, url))

        async with asyncio.TaskGroup() as group:
            for _ in range(3):
                group.create_task(load(other))
            async with streams(pair, mine, other) as made:
                first = pair.process("gateway")
                first.terminate()
                node = next(n for n in await asyncio.to_thread(nodes, pair, other) if n["id"] == "node-1")
                os.kill(node["pid"], signal.SIGTERM)
                await asyncio.to_thread(first.wait, COMMAND_S)
            over.set()
        return made

    made = asyncio.run(main())
    assert {status for status, _ in seen} == {200}
    for stream in made:
        assert not stream.error and len(stream.ids) == TOKENS
    settled(pair)
    check_bill(pair, made)


def nodes(pair: Platform, url: str) -> list[dict[str, object]]:
    headers = {"authorization": f"Bearer {pair.key}"}
    response = httpx2.get(f"{url}/admin/nodes", headers=headers, trust_env=False, timeout=COMMAND_S)
    return list(response.json()["nodes"])
