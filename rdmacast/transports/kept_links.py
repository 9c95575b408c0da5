"""Links that stay open between casts, so that the next cast need not connect (BlitzScale, appendix A.1)."""

import asyncio
from contextlib import AsyncExitStack
from dataclasses import dataclass

from rdmacast.aio.idle_set import IdleSet
from rdmacast.aio.shielded import join_shielded
from rdmacast.transport import Link, PeerAddress

MAX_KEPT = 64  # of a node: a cast has few sources for each node, but they differ from cast to cast
KEPT_S = 600.0


@dataclass(frozen=True, slots=True, eq=False)
class _KeptLink:
    """A link without a user. `stack` closes it."""

    peer: PeerAddress
    link: Link
    stack: AsyncExitStack


class KeptLinks:
    """Open links without a user: at most `most`, each kept for at most `idle_s`.

    A link has one user at a time. One that breaks while it is kept is closed when the next user would get it,
    or at the end of that time.
    """

    def __init__(self, most: int = MAX_KEPT, idle_s: float = KEPT_S) -> None:
        self._idle: IdleSet[_KeptLink] = IdleSet(most, idle_s, self._close)
        self._closing: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        return f"<KeptLinks {self._idle!r}>"

    def __len__(self) -> int:
        return len(self._idle)

    def has(self, peer: PeerAddress, transport: str) -> bool:
        """Return whether an open link to the peer by this transport is kept."""
        return any(kept.link.is_reusable for kept in self._of(peer, transport))

    def take(self, peer: PeerAddress, transport: str) -> tuple[Link, AsyncExitStack] | None:
        """Return an open link, which is then the caller's, and the stack that closes it; None without one."""
        for kept in self._of(peer, transport):
            self._idle.discard(kept)
            if kept.link.is_reusable:
                return kept.link, kept.stack
            self._close(kept)
        return None

    def put(self, peer: PeerAddress, link: Link, stack: AsyncExitStack) -> None:
        """Keep a link after its use, or close it if it is not reusable; above `most` the oldest is closed."""
        kept = _KeptLink(peer, link, stack)
        if link.is_reusable:
            self._idle.add(kept)
        else:
            self._close(kept)

    async def aclose(self) -> None:
        """Close all links. Idempotent."""
        self._idle.expire_all()
        await join_shielded(self._closing)

    def _of(self, peer: PeerAddress, transport: str) -> list[_KeptLink]:
        """Return the links to the peer by this transport, the oldest first."""
        return [kept for kept in self._idle if kept.peer == peer and kept.link.transport == transport]

    def _close(self, kept: _KeptLink) -> None:
        task = asyncio.get_running_loop().create_task(kept.stack.aclose(), name="kept link")
        self._closing.add(task)
        task.add_done_callback(self._closed)

    def _closed(self, task: asyncio.Task[None]) -> None:
        self._closing.discard(task)
        if not task.cancelled():
            task.exception()  # of a link that is gone anyway
