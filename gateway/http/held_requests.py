"""Requests that wait for an instance, by function: how many, and since when the oldest."""

from collections.abc import Iterator, Set

from registry.clock import Clock


class HeldRequests:
    """The requests of each function, in the order in which they began to wait."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._since_s: dict[str, dict[str, float]] = {}

    def __repr__(self) -> str:
        return f"<HeldRequests { ({name: len(waiting) for name, waiting in self._since_s.items()}) }>"

    def enter(self, function: str, request_id: str) -> None:
        """Record that a request begins to wait."""
        self._since_s.setdefault(function, {})[request_id] = self._clock.monotonic_s()

    def leave(self, function: str, request_id: str) -> None:
        """Record that it waits no more."""
        del self._since_s[function][request_id]

    def rows(self) -> Iterator[tuple[str, int, float]]:
        """Yield each function with the number of its requests, and the age of the oldest in seconds."""
        now_s = self._clock.monotonic_s()
        for function, waiting in self._since_s.items():
            yield function, len(waiting), now_s - next(iter(waiting.values()), now_s)

    def forget_except(self, functions: Set[str]) -> None:
        """Drop all other functions for which nothing waits."""
        for name in [
            name for name, waiting in self._since_s.items() if not waiting and name not in functions
        ]:
            del self._since_s[name]
