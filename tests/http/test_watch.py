"""The event stream of the console over real HTTP: who is sent what, and when it ends."""

import asyncio
import itertools
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from gateway.core.settings import StreamSettings
from gateway.http.drain import ServingPhase
from gateway.watch.hub import MAX_OF_TENANT, WatchHub
from gateway.watch.scope import WatchScope
from registry.clock import SystemClock
from registry.config.secrets import new_api_key
from registry.errors import ChannelClosed
from registry.messages.arrivals import Arrivals, ArrivingImage
from registry.records.api_key import KeyRole
from registry.records.change import CallTraffic
from registry.records.function import Access
from tests.fixtures.gateway_http import Gateway, gateway
from tests.fixtures.patience import PATIENCE_S, until
from tests.fixtures.registry_records import cast, instance, node


class Stream:
    """The frames of one watcher, folded as the console folds them."""

    def __init__(self, lines: AsyncIterator[str]) -> None:
        self._lines = lines
        self.shown: dict[str, dict[str, Any]] = {}
        self.frames = 0

    async def next(self) -> dict[str, Any]:
        """Return the next frame, applied. Raises StopAsyncIteration at the end of the stream."""
        while True:
            line = await anext(self._lines)
            if line.startswith("data: "):
                break
        frame: dict[str, Any] = json.loads(line[6:])
        if "error" not in frame:
            self.frames += 1
            if frame["full"]:
                self.shown = {}
            for kind, ids in frame["gone"].items():
                for id_ in ids:
                    del self.shown[kind][id_]
            for kind, entries in frame["set"].items():
                self.shown.setdefault(kind, {}).update(entries)
        return frame

    async def until(self, kind: str, ids: set[str]) -> dict[str, Any]:
        """Read frames until the entries of a kind are these; return them."""
        async with asyncio.timeout(PATIENCE_S):
            while self.shown.get(kind, {}).keys() != ids:
                await self.next()
        return self.shown.get(kind, {})


@asynccontextmanager
async def watching(gw: Gateway, key: str | None = None) -> AsyncIterator[Stream]:
    async with gw.http(key) as http, http.stream("GET", "/admin/watch") as answer:
        assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream")
        stream = Stream(answer.aiter_lines())
        assert (await stream.next())["full"]
        yield stream


async def key_of(gw: Gateway, tenant: str, role: KeyRole) -> str:
    made = new_api_key(tenant, role, "")
    await gw.state.put_key(made.key)
    return made.plaintext


def arriving() -> Arrivals:
    return Arrivals(at=1.0, images=(ArrivingImage(image="a" * 64, cells=4, held=b"\1"),))


async def change(gw: Gateway, *names: str) -> None:
    """Replace the cluster's nodes by these."""
    for name in names:
        await gw.state.put_node(node(name), 60.0)
    await gw.cluster.refresh()


async def test_changes_of_the_cluster_arrive() -> None:
    async with gateway() as gw, watching(gw) as stream:
        await change(gw, "n0", "n1")
        nodes = await stream.until("nodes", {"n0", "n1"})
        assert nodes["n0"]["gpu_bytes"] == 1 << 30
        await gw.state.put_instance(instance("i0", "n0"), 1)
        await gw.cluster.refresh()
        assert (await stream.until("instances", {"i0"}))["i0"]["state"] == "loading"
        await gw.state.remove_node("n1", 1)
        await gw.cluster.refresh()
        await stream.until("nodes", {"n0"})


async def test_tenants_are_sent_their_own_functions_alone() -> None:
    async with gateway() as gw:
        await gw.add_function("coder")
        await gw.add_function("own")
        await gw.state.set_access("own", lambda _: Access(owner="acme", private=True))
        await change(gw, "n0")
        key = await key_of(gw, "acme", KeyRole.DEPLOYER)
        async with watching(gw, key) as stream:
            assert stream.shown.keys() == {"functions"} and stream.shown["functions"].keys() == {"own"}
            await gw.state.put_instance(instance("i0", "n0", function="coder"), 1)
            await gw.state.put_instance(instance("i1", "n0", function="own"), 1)
            await gw.cluster.refresh()
            await stream.until("instances", {"i1"})
            await gw.state.set_access("own", lambda _: Access(owner="globex", private=True))
            await gw.cluster.refresh()
            await stream.until("functions", set())
            assert stream.shown == {}
        async with gw.http(await key_of(gw, "acme", KeyRole.CALLER)) as http:
            assert (await http.get("/admin/watch")).status_code == 403


async def test_blocks_arrive_only_while_somebody_watches() -> None:
    async with gateway() as gw:
        await gw.add_function("tiny")
        await change(gw, "n0")
        for name in ("n1", "n2"):
            await gw.state.put_node(node(name, holdings=()), 60.0)
        await gw.state.put_cast(cast())
        await gw.cluster.refresh()
        hub = gw.services.watch
        assert "0 nodes followed" in repr(hub)
        async with watching(gw) as stream:
            await stream.until("casts", {"c0"})
            await until(lambda: "2 nodes followed" in repr(hub))
            gw.cluster.arriving["n1"] = arriving()
            gw.cluster.changes.notify()
            assert (await stream.until("blocks", {"c0 n1"}))["c0 n1"]["cells"] == 4
        await until(lambda: "0 nodes followed" in repr(hub))


async def test_requests_and_tokens_of_the_cluster_are_shown_per_second() -> None:
    async with gateway() as gw:
        await gw.add_function("tiny")
        requests = itertools.count()

        def served() -> dict[tuple[str, int], CallTraffic]:
            number = next(requests)
            return {("tiny", 1): CallTraffic(requests=number, output_tokens=9 * number)}

        gw.cluster.served = served
        async with watching(gw) as stream:
            shown = (await stream.until("traffic", {"tiny:1"}))["tiny:1"]
            assert shown["tokens_s"] > shown["requests_s"] > 0


async def test_watchers_are_bounded_for_each_tenant() -> None:
    async with gateway() as gw, AsyncExitStack() as stack:
        deployer = await key_of(gw, "acme", KeyRole.DEPLOYER)
        for _ in range(MAX_OF_TENANT - 1):
            stack.enter_context(gw.services.watch.join(WatchScope(tenant="acme"), "acme"))
        async with watching(gw, deployer), gw.http(deployer) as http:
            refused = await http.get("/admin/watch")
            assert refused.status_code == 503 and refused.json()["error"]["code"] == "overloaded"
            async with watching(gw, await key_of(gw, "globex", KeyRole.DEPLOYER)):
                pass
        await until(lambda: f"{MAX_OF_TENANT - 1} watchers" in repr(gw.services.watch))
        async with watching(gw, deployer):
            pass


async def test_a_stream_ends_when_its_key_does() -> None:
    async with gateway(streams=StreamSettings(key_check_s=0.0)) as gw:
        made = new_api_key("acme", KeyRole.VIEWER, "")
        await gw.state.put_key(made.key)
        async with watching(gw, made.plaintext) as stream:
            async with gw.http() as http:
                assert (await http.delete(f"/admin/keys/{made.key.id}")).status_code == 200
            async with asyncio.timeout(PATIENCE_S):
                while "error" not in (frame := await stream.next()):
                    pass
            assert frame["error"]["code"] == "invalid_api_key"
            with pytest.raises(StopAsyncIteration):
                await stream.next()


async def test_watchers_do_not_delay_a_shutdown() -> None:
    async with gateway() as gw, watching(gw) as stream:
        gw.services.limiter.drain()
        assert gw.services.limiter.phase is ServingPhase.DRAINING
        assert gw.services.limiter.in_flight == 0
        with pytest.raises(StopAsyncIteration):
            async with asyncio.timeout(PATIENCE_S):
                while True:
                    await stream.next()


async def test_one_that_reads_too_slowly_gets_the_whole_again() -> None:
    async with gateway() as gw:
        hub = WatchHub(gw.cluster, SystemClock(), "g")
        with hub.join(WatchScope(everything=True), "acme") as watcher:
            watcher.put(b"whole", whole=True)
            for index in range(40):
                watcher.put(b"%d" % index)
            assert watcher.needs_whole
            assert await watcher.next(0.0) is None
            watcher.put(b"whole again", whole=True)
            watcher.put(b"next")
            assert [await watcher.next(0.0) for _ in range(3)] == [b"whole again", b"next", None]


async def test_a_node_that_reports_nothing_is_asked_again() -> None:
    async with gateway() as gw:
        await gw.add_function("tiny")
        await gw.state.put_node(node("n1", holdings=()), 60.0)
        await gw.state.put_cast(cast())
        await gw.cluster.refresh()
        gw.cluster.silent = ChannelClosed("n1 is lost")
        async with watching(gw) as stream:
            await stream.until("casts", {"c0"})
            await until(lambda: ("arrivals", "n1") in gw.cluster.asked)
            gw.cluster.silent = None
            gw.cluster.arriving["n1"] = arriving()
            await stream.until("blocks", {"c0 n1"})


async def test_once_is_one_whole_frame() -> None:
    async with gateway() as gw, gw.http() as http:
        await change(gw, "n0")
        answer = await http.get("/admin/watch", params={"once": "true"})
        (data,) = [line for line in answer.text.splitlines() if line.startswith("data: ")]
        assert json.loads(data[6:])["set"]["nodes"].keys() == {"n0"}
        assert (await http.get("/admin/watch", params={"once": "perhaps"})).status_code == 422
