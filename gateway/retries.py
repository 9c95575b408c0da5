"""When to try again on a node what failed there: waits that double. Pure."""

from dataclasses import dataclass, replace

from gateway.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """A node on which an image could not be warmed (or dropped): not before `until`."""

    until: float
    count: int


class Retries:
    """By image and node."""

    def __init__(self, *, first_s: float, most_s: float) -> None:
        self._first_s = first_s
        self._most_s = most_s
        self._retries: dict[tuple[str, str], Retry] = {}

    def __repr__(self) -> str:
        return f"<Retries {len(self._retries)}>"

    def forget_old(self, now: float) -> None:
        self._retries = {pair: r for pair, r in self._retries.items() if r.until + self._most_s > now}

    def failed(self, image: str, node: str, now: float) -> None:
        retry = self._retries.get((image, node), Retry(until=0.0, count=0))
        wait_s = min(self._most_s, self._first_s * 2**retry.count)
        self._retries[image, node] = replace(retry, until=now + wait_s, count=retry.count + 1)

    def wait(self, image: str, node: str, plan: Plan, now: float) -> bool:
        """Whether it is too early; then `plan` is told when it no longer is."""
        retry = self._retries.get((image, node))
        if retry is None or now >= retry.until:
            return False
        plan.again_at(retry.until)
        return True
