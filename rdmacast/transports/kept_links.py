"""Links that stay open between casts, so that the next cast need not connect (BlitzScale, appendix A.1)."""

import asyncio
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

from rdmacast.aio.shielded import join_shielded
from rdmacast.transport import Link, PeerAddress

MAX_KEPT = 64  # of a node: a cast has few sources for each node, but they differ from cast to cast
KEPT_S = 600.0

_Way = tuple[PeerAddress, str]  # a peer and a transport


@dataclass(slots=True, eq=False)
class _KeptLink:
    """A link without a user. `stack` closes it."""

    way: _Way
    link: Link
    stack: AsyncExitStack
    timer: asyncio.TimerHandle | None = field(default=None)


class KeptLinks:
    """Idle links by peer and transport: at most `most`, each for at most `idle_s`.

    A link has one user at a time. One that breaks while it is idle is closed when it would be used.
    """

    def __init__(self, most: int = MAX_KEPT, idle_s: float = KEPT_S) -> None:
        self._most = most
        self._idle_s = idle_s
        self._idle: dict[_KeptLink, None] = {}  # oldest first
        self._by_way: dict[_Way, list[_KeptLink]] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        return f"<KeptLinks {len(self._idle)} of at most {self._most}>"

    def __len__(self) -> int:
        return len(self._idle)

    def has(self, peer: PeerAddress, transport: str) -> bool:
        """Return whether an open link is kept."""
        return any(kept.link.is_reusable for kept in self._by_way.get((peer, transport), ()))

    def take(self, peer: PeerAddress, transport: str) -> tuple[Link, AsyncExitStack] | None:
        """Return an open link that nobody uses, and the stack that closes it; None if there is none."""
        for kept in tuple(self._by_way.get((peer, transport), ())):
            self._remove(kept)
            if kept.link.is_reusable:
                return kept.link, kept.stack
            self._close(kept)
        return None

    def put(self, peer: PeerAddress, link: Link, stack: AsyncExitStack) -> None:
        """Keep a link after its use, or close it if it is not reusable; of too many the oldest is closed."""
        kept = _KeptLink((peer, link.transport), link, stack)
        if not link.is_reusable or self._most < 1:
            self._close(kept)
            return
        kept.timer = asyncio.get_running_loop().call_later(self._idle_s, self._expire, kept)
        self._idle[kept] = None
        self._by_way.setdefault(kept.way, []).append(kept)
        if len(self._idle) > self._most:
            self._expire(next(iter(self._idle)))

    async def aclose(self) -> None:
        """Close all links. Idempotent."""
        for kept in tuple(self._idle):
            self._expire(kept)
        await join_shielded(self._closing)

    def _expire(self, kept: _KeptLink) -> None:
        self._remove(kept)
        self._close(kept)

    def _remove(self, kept: _KeptLink) -> None:
        if kept.timer is not None:
            kept.timer.cancel()
        del self._idle[kept]
        alike = self._by_way[kept.way]
        alike.remove(kept)
        if not alike:
            del self._by_way[kept.way]

    def _close(self, kept: _KeptLink) -> None:
        task = asyncio.get_running_loop().create_task(kept.stack.aclose(), name="kept link")
        self._closing.add(task)
        task.add_done_callback(self._closed)

    def _closed(self, task: asyncio.Task[None]) -> None:
        self._closing.discard(task)
        if not task.cancelled():
            task.exception()  # of a link that is gone anyway
