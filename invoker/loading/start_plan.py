"""The choice of a start's sources, from where the image is cached (pure)."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from registry.messages.node import ImageHolder
from registry.records.instance import StartKind


class Residence(StrEnum):
    """Where this node has the image, nearest first."""

    ARENA = "arena"  # complete, on the accelerator
    HOST = "host"  # complete, in this host's memory
    LOADING = "loading"  # being loaded by another process of this host
    NOWHERE = "nowhere"


@dataclass(frozen=True, slots=True, kw_only=True)
class StartPlan:
    """The kind of a start and the sources to try, in order.

    A source is `arena`, `host`, `node:<id>` or `store`.
    """

    kind: StartKind
    sources: tuple[str, ...]

    @property
    def first(self) -> str:
        return self.sources[0] if self.sources else ""


def choose_start(
    residence: Residence, holders: Sequence[ImageHolder], *, node: str, host: str, reads_store: bool
) -> StartPlan:
    """Choose the nearest source: arena, host memory, a load on this host, peers, the store.

    The store comes after all peers, in case they fail. This node and peers that share its host tier are not
    sources: their host memory is the same. A peer of this host with the image on its accelerator is the first
    of the peers.
    """
    if residence is Residence.ARENA:
        return StartPlan(kind=StartKind.HOT, sources=("arena",))
    peers = [
        holder
        for holder in holders
        if holder.node != node and not (holder.host == host and holder.tier == "host")
    ]
    peers.sort(key=lambda holder: holder.host != host)
    elsewhere = [f"node:{holder.node}" for holder in peers]
    if reads_store:
        elsewhere.append("store")
    if residence is Residence.HOST:
        return StartPlan(kind=StartKind.WARM, sources=("host",))
    if residence is Residence.LOADING:
        return StartPlan(kind=StartKind.COLD, sources=("host", *elsewhere))
    return StartPlan(kind=StartKind.COLD, sources=tuple(elsewhere))
