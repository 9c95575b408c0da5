"""vLLM's servers that start while their model is cast to their nodes, beside servers whose nodes have it."""

from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import uvloop

from benchmarks.harness.admin_client import AdminClient, http_client, until
from benchmarks.harness.local_platform import LocalPlatform, PlatformStateError
from benchmarks.stock_engines.vllm_server import ServerStart, StartTimes, StartTogether
from invoker.loading.attach import socket_path
from invoker.vllm.model_infos import ModelInfos

GIB = 1 << 30
# What a server takes beside the weights: vLLM itself, and the used part of its KV cache.
SERVER_BYTES = 5 * GIB // 2
NODE_BYTES = GIB // 4
WAIT_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CastSeen:
    """A cast as the gateway shows it; `received` counts the bytes that arrived at its nodes."""

    planner: str
    seconds: float
    received: int

    @classmethod
    def of(cls, shown: Mapping[str, Any]) -> Self:
        """Read a cast of /admin/casts. Raises PlatformStateError unless it is complete."""
        if shown["state"] != "complete":
            raise PlatformStateError(f"a cast is {shown['state']}")
        received = sum(shown["received"].values())
        return cls(planner=shown["planner"], seconds=shown["seconds"], received=received)


@dataclass(frozen=True, slots=True, kw_only=True)
class CastRound:
    """One round: one engine and all, on nodes that have the model; the cast alone; both at once."""

    one: StartTimes
    start: Sequence[StartTimes]
    transfer: CastSeen
    during_cast: Sequence[StartTimes]
    casts: Sequence[CastSeen]  # that ran while `during_cast` did

    @property
    def start_s(self) -> float:
        return ready_s(self.start)

    @property
    def during_cast_s(self) -> float:
        return ready_s(self.during_cast)

    @property
    def over_start_s(self) -> float:
        """Seconds that the cast added to the start."""
        return self.during_cast_s - self.start_s

    @property
    def ratio(self) -> float:
        """The start during the cast, in units of the start and the transfer one after the other."""
        return self.during_cast_s / (self.start_s + self.transfer.seconds)

    def has_tokens(self, ids: Sequence[int]) -> bool:
        return all(one.ids == tuple(ids) for one in (self.one, *self.start, *self.during_cast))


def ready_s(times: Sequence[StartTimes]) -> float:
    """Return when the last engine serves."""
    return max(one.ready_s for one in times)


def load_s(times: Sequence[StartTimes]) -> float:
    """Return how long the slowest engine waited for weights and read them."""
    return max(one.load_s for one in times)


def shortfall(engines: int, image_bytes: int, free_shared_bytes: int, available_bytes: int) -> str:
    """Return what memory is missing for that many engines, each on a node, and what to do, or ""."""
    copies = (engines + 1) * image_bytes
    servers = engines * (SERVER_BYTES + image_bytes) + (engines + 1) * NODE_BYTES
    for kind, need, free in (
        ("shared memory", copies, free_shared_bytes),
        ("memory", copies + servers, available_bytes),
    ):
        if need > free:
            return (
                f"--engines-in-cast {engines} needs {need / GIB:.1f} GiB of {kind}, "
                f"{free / GIB:.1f} GiB are free: use fewer engines"
            )
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CastCluster:
    """A platform with a function's model on its `owner`; engines run on the other nodes, `targets`."""

    platform: LocalPlatform
    function: str
    owner: str
    targets: Sequence[str]
    root: Path  # of the nodes' shared memory

    @classmethod
    def find(cls, platform: LocalPlatform, function: str) -> Self:
        """Return the cluster once a node has the deployed function's model. Raises PlatformStateError."""
        owner = uvloop.run(_owner(platform, function))
        folder = Path(platform.command("pull", function, "--on", owner).strip())
        targets = [node.name for node in platform.nodes if node.name != owner]
        return cls(platform=platform, function=function, owner=owner, targets=targets, root=folder.parents[3])

    def place(self, nodes: Collection[str]) -> list[CastSeen]:
        """Have exactly the owner and these nodes hold the model; return the casts that this took."""
        return uvloop.run(self._place(nodes))

    def starts(self, start: ServerStart) -> list[ServerStart]:
        """Return this start on each of the targets, with the weights from the node."""
        return [self.start_on(start, node) for node in self.targets]

    def start_on(self, start: ServerStart, node: str) -> ServerStart:
        loader = {"model": self.function, "socket": str(socket_path(self.root, node))}
        return replace(start, loader=loader)

    async def _place(self, nodes: Collection[str]) -> list[CastSeen]:
        async with http_client(self.platform.url, self.platform.admin_key, WAIT_S) as http:

            async def casts() -> dict[str, Any]:
                shown = (await http.get(f"/admin/casts?function={self.function}")).json()["casts"]
                return {one["cast_id"]: one for one in shown}

            before, new = await casts(), dict[str, Any]()

            async def ended() -> bool:
                new.update((key, one) for key, one in (await casts()).items() if key not in before)
                return all(one["state"] != "running" for one in new.values())

            await AdminClient(http).place_image(self.function, [self.owner, *nodes])
            await until(f"the casts of {self.function} have ended", ended)
            return [CastSeen.of(one) for one in new.values()]


def run_round(
    cluster: CastCluster, start: ServerStart, infos: ModelInfos, start_together: StartTogether
) -> CastRound:
    """Measure one round. Raises PlatformStateError, ServerDied, ServerFailed."""
    cluster.place(())
    transfer = _only(cluster.place(cluster.targets))
    starts = cluster.starts(start)
    (one,) = start_together(starts[:1], infos)
    together = start_together(starts, infos)
    cluster.place(())
    with ThreadPoolExecutor(1) as pool:
        cast = pool.submit(cluster.place, cluster.targets)
        during_cast = start_together(starts, infos)
        casts = cast.result()
    return CastRound(one=one, start=together, transfer=transfer, during_cast=during_cast, casts=casts)


def _only(casts: Sequence[CastSeen]) -> CastSeen:
    if len(casts) != 1:
        raise PlatformStateError(f"{len(casts)} casts ran instead of one")
    return casts[0]


async def _owner(platform: LocalPlatform, function: str) -> str:
    """Return the node that keeps the cluster's copy of the model."""
    found: list[str] = []
    async with http_client(platform.url, platform.admin_key, WAIT_S) as http:
        admin = AdminClient(http)

        async def held() -> bool:
            nodes = await admin.nodes()
            found[:] = [node["id"] for node in nodes if f"{function}:1" in node["tiers"]["host"]]
            return bool(found)

        await until(f"a node has {function}", held)
    return found[0]
