"""Whether a sequence's keys and values are computed anew where it goes on, or sent there (pure)."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from math import inf

LINK_BYTES_PER_S = 1.25e9  # of a link by which nothing was sent yet: 10 Gbit/s
# With less in a shorter time, what is measured is latency.
_MEASURED_BYTES, _MEASURED_S = 256 << 10, 0.02
_WEIGHT = 0.5  # of the latest transfer, against all before it
_BELIEVED_S = 60.0


class KvPolicy(StrEnum):
    """Whether K and V are fetched."""

    AUTO = "auto"  # where that is cheaper, and never for longer than computing them takes
    ALWAYS = "always"
    NEVER = "never"


@dataclass(frozen=True, slots=True, kw_only=True)
class KvCosts:
    """What moving or computing keys and values takes. `token_layer_bytes` are those of a token in a layer;
    `link_bytes_per_s` is what the link gives besides the weights that may still be on it."""

    token_layer_bytes: int
    link_bytes_per_s: float
    prefill_tokens_per_s: float
    latency_s: float = 0.0


class KvWay(StrEnum):
    RECOMPUTE = "recompute"
    TRANSFER = "transfer"


@dataclass(frozen=True, slots=True, kw_only=True)
class KvDecision:
    way: KvWay
    recompute_s: float
    transfer_s: float
    reason: str


def decide_kv(tokens: int, layers: int, costs: KvCosts) -> KvDecision:
    """How a request of `tokens` so far gets its keys and values where it goes on.

    `layers` are those whose keys and values would come from elsewhere. Computing them anew takes a whole
    prefill, however few they are: each layer needs what the one before it makes.
    """
    nbytes = tokens * layers * costs.token_layer_bytes
    recompute_s = tokens / costs.prefill_tokens_per_s
    transfer_s = costs.latency_s + nbytes / costs.link_bytes_per_s if costs.link_bytes_per_s > 0 else inf
    way = KvWay.TRANSFER if transfer_s < recompute_s else KvWay.RECOMPUTE
    reason = (
        f"{way}: {tokens} tokens are computed in {_seconds(recompute_s)}, "
        f"their {nbytes / 1e6:.1f} MB of {layers} layers sent in {_seconds(transfer_s)}"
    )
    return KvDecision(way=way, recompute_s=recompute_s, transfer_s=transfer_s, reason=reason)


class PrefillRate:
    """How fast tokens go through layers of one instance: at the best that any step has reached, since what
    decodes, waits or is disturbed says nothing of prefill."""

    def __init__(self) -> None:
        self._token_layers_per_s = 0.0

    def __repr__(self) -> str:
        return f"<PrefillRate {self._token_layers_per_s:.0f} tokens x layers / s>"

    def ran(self, tokens: int, layers: int, seconds: float) -> None:
        if seconds > 0:
            self._token_layers_per_s = max(self._token_layers_per_s, tokens * layers / seconds)

    def tokens_per_s(self, layers: int) -> float | None:
        """Through so many layers; None while nothing is known."""
        return self._token_layers_per_s / layers if self._token_layers_per_s else None


class KvLinks:
    """What this node's link gave when K and V of a call came over it, by the hosts that they came from, side
    by side. It is believed for a minute: nothing is sent over a link that seems slow, so nothing would show
    that it is not any more. That they did not come in time tells of the link if it happens twice: the first
    time they may still have been put aside."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._bytes_per_s: dict[frozenset[str], float] = {}
        self._until_s: dict[frozenset[str], float] = {}
        self._missed: set[frozenset[str]] = set()

    def __repr__(self) -> str:
        return f"<KvLinks {self._bytes_per_s}>"

    def came(self, hosts: frozenset[str], nbytes: int, seconds: float) -> None:
        """So much came from all of them together."""
        self._missed.discard(hosts)
        if seconds > 0 and (nbytes >= _MEASURED_BYTES or seconds >= _MEASURED_S):
            before = self._bytes_per_s[hosts] if self._is_known(hosts) else nbytes / seconds
            self._believe(hosts, (1 - _WEIGHT) * before + _WEIGHT * nbytes / seconds)

    def missed(self, hosts: frozenset[str], nbytes: int, seconds: float) -> None:
        """So much did not come within that time."""
        if hosts not in self._missed:
            self._missed.add(hosts)
        elif seconds > 0:
            self._believe(hosts, min(self.bytes_per_s(hosts), nbytes / seconds))

    def bytes_per_s(self, hosts: frozenset[str]) -> float:
        return self._bytes_per_s[hosts] if self._is_known(hosts) else LINK_BYTES_PER_S

    def _believe(self, hosts: frozenset[str], bytes_per_s: float) -> None:
        self._bytes_per_s[hosts] = bytes_per_s
        self._until_s[hosts] = self._now_s() + _BELIEVED_S

    def _is_known(self, hosts: frozenset[str]) -> bool:
        return self._now_s() < self._until_s.get(hosts, -inf)


def _seconds(seconds: float) -> str:
    if seconds == inf:
        return "for ever"
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"
