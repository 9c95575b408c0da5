"""HAVE requests to peers, and those without a reply (pure)."""

from dataclasses import dataclass

from rdmacast.cast.session_actions import RequestHave


@dataclass(frozen=True, slots=True)
class _PendingRequest:
    number: int
    attempts: int  # of this peer without an answer
    deadline_s: float


class HaveRequests:
    """The HAVE requests of one node; only the latest one to each peer counts.

    A reply is due within `timeout_s`; after `max_attempts` requests without a reply the peer is silent.
    """

    def __init__(self, *, timeout_s: float, max_attempts: int) -> None:
        self._timeout_s = timeout_s
        self._max_attempts = max_attempts
        self._pending: dict[int, _PendingRequest] = {}
        self._count = 0

    def __repr__(self) -> str:
        return f"HaveRequests({self._count} asked, {len(self._pending)} without an answer)"

    def __contains__(self, peer: int) -> bool:
        """Return whether a request to the peer has no reply yet."""
        return peer in self._pending

    @property
    def deadlines_s(self) -> list[float]:
        return [pending.deadline_s for pending in self._pending.values()]

    def request(self, peer: int, now_s: float) -> RequestHave:
        before = self._pending.get(peer)
        self._count += 1
        self._pending[peer] = _PendingRequest(
            number=self._count,
            attempts=1 if before is None else before.attempts + 1,
            deadline_s=now_s + self._timeout_s,
        )
        return RequestHave(peer, self._count)

    def on_reply(self, peer: int, number: int | None) -> bool:
        """Record a reply; returns whether it answers the latest request to the peer.

        A reply to a request from before a node was lost may be older than that loss, too.
        """
        pending = self._pending.get(peer)
        if pending is None or pending.number != number:
            return False
        del self._pending[peer]
        return True

    def overdue(self, now_s: float) -> list[int]:
        """Return the peers whose replies are overdue."""
        return [peer for peer, pending in self._pending.items() if pending.deadline_s <= now_s]

    def is_exhausted(self, peer: int) -> bool:
        """Return whether the peer has had all its attempts."""
        return self._pending[peer].attempts >= self._max_attempts

    def clear(self) -> None:
        """Expect no replies any more."""
        self._pending.clear()
