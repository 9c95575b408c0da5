"""Where to start from: a pure decision over what this node holds and who else holds the image."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from registry.instance import StartKind
from registry.messages import Holder


class Residence(StrEnum):
    """Where this node has the image, nearest first."""

    ARENA = "arena"  # whole, on the accelerator
    HOST = "host"  # whole, in this host's memory
    LOADING = "loading"  # another process of this host is loading it now
    NOWHERE = "nowhere"


@dataclass(frozen=True, slots=True, kw_only=True)
class StartPlan:
    """The kind of the start and the sources to try, in order.

    A step of `sources` is `arena`, `host`, `node:<id>` or `store`.
    """

    kind: StartKind
    sources: tuple[str, ...]

    @property
    def first(self) -> str:
        return self.sources[0] if self.sources else ""


def choose_start(
    residence: Residence, holders: Sequence[Holder], *, node: str, host: str, reads_store: bool
) -> StartPlan:
    """The nearest start: arena, host memory, a load under way on this host, peers, the store.

    The store comes last even where peers are known, for the case that all of them fail. This node and
    peers that share its host tier are no sources: what they hold in host memory is here already.
    A peer on this host that holds the image on its accelerator is asked first of the peers.
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
