"""The fence of a lease: what distinguishes the actions of its holder from those of an earlier one."""

import secrets
from dataclasses import dataclass

_TIME_DIGITS = 12  # of the milliseconds in hexadecimal


@dataclass(frozen=True, slots=True, order=True)
class Fence:
    """The holder of a lease in order: later holders have greater fences, even after Redis lost its state.

    `epoch` counts the holders within Redis. `incarnation` is a random id of the shared state, renewed when
    the state was emptied or is older than what a gateway or node has seen; ids sort by the time of renewal.
    "" is that of a release without incarnations.
    """

    incarnation: str = ""
    epoch: int = 0

    def next_incarnation(self, wall_s: float) -> str:
        """Return a new incarnation, greater than that of this fence whatever the clock shows."""
        known = int(self.incarnation[:_TIME_DIGITS] or "0", 16)
        return f"{max(int(wall_s * 1000), known + 1):0{_TIME_DIGITS}x}{secrets.token_hex(4)}"


NO_FENCE = Fence()
