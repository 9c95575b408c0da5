"""A platform of its own with slow links, on which functions load again and again."""

import asyncio
import shutil
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx2

from benchmarks.chaos_cluster import Cluster

PATIENCE_S = 120.0
_POLL_S = 0.05


class NotThere(Exception):
    """The platform did not come to where the measurement needs it."""


@contextmanager
def platform(args: Namespace, nodes: int, *flags: str) -> Iterator[Cluster]:
    """A cluster that is up, as `add_platform` has it and by these flags of `hypercast up`, each node on a
    host of its own. Its folder stays if it was given."""
    folder = args.data_dir
    data = folder or Path(tempfile.mkdtemp(prefix="hypercast-live-"))
    cluster = Cluster(data, nodes=nodes, gateways=1)
    memory = ("--gpu-memory", args.memory, "--host-memory", args.memory)
    try:
        try:
            cluster.up("--link-rate", args.link_rate, "--meter-interval", "5s", *memory, *flags)
        except BaseException:
            with suppress(RuntimeError):  # nothing came up
                cluster.down()
            raise
        try:
            yield cluster
        finally:
            cluster.down()
    finally:
        if folder is None:
            shutil.rmtree(data, ignore_errors=True)


class Stage:
    """What is asked of the platform's administration: who holds a function's image, and who loads it."""

    def __init__(self, http: httpx2.AsyncClient) -> None:
        self._http = http

    async def nodes(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = (await self._get("/admin/nodes"))["nodes"]
        return found

    async def states(self, function: str) -> dict[str, str]:
        """Of its instances, by node."""
        return {one["node"]: one["state"] for one in (await self.function(function))["instances"]}

    async def function(self, function: str) -> dict[str, Any]:
        found: dict[str, Any] = await self._get(f"/admin/functions/{function}")
        return found

    async def last_cast(self, function: str, nodes: Collection[str]) -> dict[str, float]:
        """When each of these nodes had all blocks of its latest cast, in Unix seconds. Raises NotThere."""
        came: dict[str, float] = {}

        async def told() -> bool:
            cast = (await self._get(f"/admin/casts?function={function}"))["casts"][0]
            parts = [one for one in cast["nodes"] if one["state"] == "complete"]
            came.update({one["node"]: one["updated_at"] for one in parts})
            return came.keys() >= set(nodes)

        await until(f"the latest cast of {function} is complete on {', '.join(nodes)}", told)
        return came

    async def pipelines(self, function: str) -> list[dict[str, Any]]:
        live = (await self.function(function))["live"]
        return [] if live is None else list(live["pipelines"])

    async def scale(self, function: str, instances: int, on: Sequence[str] = (), *, wait: bool) -> None:
        wish = {"instances": instances, "on": list(on), "wait": wait}
        await self._post(f"/admin/functions/{function}/scale", wish)

    async def asleep(self, function: str) -> None:
        """No instance of it is left."""

        async def gone() -> bool:
            if not await self.states(function):
                return True
            await self.scale(function, 0, wait=False)
            return False

        await until(f"{function} is asleep", gone)

    async def held_by(self, function: str, wanted: Sequence[str]) -> None:
        """These nodes hold the image in their hosts' memory, and no other node has anything of it."""
        await self.asleep(function)
        tag = f"{function}:1"

        async def so() -> bool:
            nodes = await self.nodes()
            holders = {node["id"] for node in nodes if tag in node["tiers"]["host"]}
            on_gpu = {node["id"] for node in nodes if tag in node["tiers"]["gpu"]}
            if holders == set(wanted) and not on_gpu:
                return True
            if missing := sorted(set(wanted) - holders):
                await self._post(f"/admin/functions/{function}/warm", {"on": missing})
            elif extra := sorted(holders - set(wanted)):
                await self._post(f"/admin/functions/{function}/drop", {"tier": "host", "on": extra})
            if on_gpu:
                await self._post(f"/admin/functions/{function}/drop", {"tier": "gpu", "on": []})
            return False

        await until(f"{', '.join(wanted)} alone hold {function}", so)

    async def counter(self, name: str) -> float:
        response = await self._http.get("/metrics")
        lines = [line.split() for line in response.text.splitlines() if line.startswith(name)]
        return sum(float(line[-1]) for line in lines)

    async def _get(self, path: str) -> Any:
        return (await self._ask("GET", path, None)).json()

    async def _post(self, path: str, body: dict[str, object]) -> None:
        response = await self._ask("POST", path, body)
        if '"error"' in response.text:  # in what is told line by line
            raise NotThere(f"{path}: {response.text[:300]}")

    async def _ask(self, method: str, path: str, body: dict[str, object] | None) -> httpx2.Response:
        """Ask again while the platform says that it cannot answer now. Raises NotThere."""
        deadline_s = time.monotonic() + PATIENCE_S
        while True:
            response = await self._http.request(method, path, json=body)
            if response.status_code == 200:
                return response
            if response.status_code != 503 or time.monotonic() > deadline_s:
                raise NotThere(f"{path}: {response.status_code} {response.text[:300]}")
            await asyncio.sleep(_POLL_S)


async def until(what: str, holds: Callable[[], Any], patience_s: float = PATIENCE_S) -> None:
    """Wait for what only the platform's interfaces show. Raises NotThere."""
    deadline_s = time.monotonic() + patience_s
    while not await holds():
        if time.monotonic() > deadline_s:
            raise NotThere(f"waited {patience_s:g} s in vain until {what}")
        await asyncio.sleep(_POLL_S)
