"""Whether a sequence's keys and values are computed anew where it goes on, or sent there (pure)."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from math import inf

LINK_BYTES_PER_S = 1.25e9  # of a link by which nothing was sent yet: 10 Gbit/s
_MEASURED_BYTES = 256 << 10  # with less, what is measured is latency
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
    `link_bytes_per_s` is what the link gives besides the weights that may still be on it. Moving takes
    `least_s` at least."""

    token_layer_bytes: int
    link_bytes_per_s: float
    prefill_tokens_per_s: float
    latency_s: float = 0.0
    least_s: float = 0.0


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
    transfer_s = max(transfer_s, costs.least_s)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Believed:
    value: float
    until_s: float


class KvLinks:
    """What this node's link gave when K and V of a call came over it, by the hosts that they came from, side
    by side. It is believed for a minute: nothing is sent over a link that seems slow, so nothing would show
    that it is not any more. That they did not come in time tells of those hosts if it happens twice in a
    minute: the first time they may still have been put aside."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._rates: dict[frozenset[str], _Believed] = {}
        self._least: dict[frozenset[str], _Believed] = {}
        self._missed: dict[frozenset[str], _Believed] = {}

    def __repr__(self) -> str:
        return f"<KvLinks {self._rates}>"

    def came(self, hosts: frozenset[str], nbytes: int, seconds: float) -> None:
        """So much came from all of them together."""
        self._missed.pop(hosts, None)
        self._least.pop(hosts, None)
        if nbytes >= _MEASURED_BYTES and seconds > 0:
            before = self._known(self._rates, hosts)
            rate = nbytes / seconds
            self._believe(
                self._rates, hosts, rate if before is None else _WEIGHT * rate + (1 - _WEIGHT) * before
            )

    def missed(self, hosts: frozenset[str], seconds: float) -> None:
        """Not all came within that time."""
        if self._known(self._missed, hosts) is not None:
            self._believe(self._least, hosts, seconds)
        self._believe(self._missed, hosts, seconds)

    def bytes_per_s(self, hosts: frozenset[str]) -> float:
        rate = self._known(self._rates, hosts)
        return LINK_BYTES_PER_S if rate is None else rate

    def least_s(self, hosts: frozenset[str]) -> float:
        """What it takes at least, however little it is."""
        return self._known(self._least, hosts) or 0.0

    def _believe(self, of: dict[frozenset[str], _Believed], hosts: frozenset[str], value: float) -> None:
        now_s = self._now_s()
        for old in [one for one, believed in of.items() if believed.until_s <= now_s]:
            del of[old]
        of[hosts] = _Believed(value=value, until_s=now_s + _BELIEVED_S)

    def _known(self, of: dict[frozenset[str], _Believed], hosts: frozenset[str]) -> float | None:
        believed = of.get(hosts)
        return None if believed is None or believed.until_s <= self._now_s() else believed.value


def _seconds(seconds: float) -> str:
    if seconds == inf:
        return "for ever"
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"
