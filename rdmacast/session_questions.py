"""What a node asked its peers and what has no answer yet (pure)."""

from dataclasses import dataclass

from rdmacast.session_actions import Ask


@dataclass(frozen=True, slots=True)
class _Question:
    number: int
    asks: int  # of this peer without an answer
    deadline_s: float


class Questions:
    """To each peer the latest counts alone. An answer is due within `timeout_s`; who owes `max_asks` is
    silent."""

    def __init__(self, *, timeout_s: float, max_asks: int) -> None:
        self._timeout_s = timeout_s
        self._max_asks = max_asks
        self._asked: dict[int, _Question] = {}
        self._count = 0

    def __repr__(self) -> str:
        return f"Questions({self._count} asked, {len(self._asked)} without an answer)"

    def __contains__(self, peer: int) -> bool:
        """Whether the peer owes an answer."""
        return peer in self._asked

    @property
    def deadlines_s(self) -> list[float]:
        return [question.deadline_s for question in self._asked.values()]

    def ask(self, peer: int, now_s: float) -> Ask:
        before = self._asked.get(peer)
        self._count += 1
        self._asked[peer] = _Question(
            number=self._count,
            asks=1 if before is None else before.asks + 1,
            deadline_s=now_s + self._timeout_s,
        )
        return Ask(peer, self._count)

    def answered(self, peer: int, number: int | None) -> bool:
        """Whether that was the answer to the latest question; it has one then.

        An answer to a question from before somebody was lost may be from before that, too.
        """
        asked = self._asked.get(peer)
        if asked is None or asked.number != number:
            return False
        del self._asked[peer]
        return True

    def late(self, now_s: float) -> list[int]:
        """Peers whose answers are overdue."""
        return [peer for peer, question in self._asked.items() if question.deadline_s <= now_s]

    def is_silent(self, peer: int) -> bool:
        """Whether it need not be asked again."""
        return self._asked[peer].asks >= self._max_asks

    def clear(self) -> None:
        """Expect no answer any more."""
        self._asked.clear()
