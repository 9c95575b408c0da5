"""The cost model that decides whether a moved sequence's K and V are transferred or recomputed (pure)."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from math import inf
from typing import Generic, TypeVar

from rdmacast.link_rate import LinkRate

_MEASURED_BYTES = 256 << 10  # a smaller transfer measures latency
_ESTIMATE_TTL_S = 60.0

T = TypeVar("T")


class KvPolicy(StrEnum):
    """When K and V of moved sequences are fetched."""

    AUTO = "auto"  # if cheaper, with the duration of recomputing them as the timeout
    ALWAYS = "always"
    NEVER = "never"


@dataclass(frozen=True, slots=True, kw_only=True)
class KvCosts:
    """Costs of transferring or recomputing K and V.

    `token_layer_bytes` is the size of one token in one layer; `link_bytes_per_s` the rate left beside weights
    on the link; `min_s` a lower bound of a transfer's duration.
    """

    token_layer_bytes: int
    link_bytes_per_s: float
    prefill_tokens_per_s: float
    latency_s: float = 0.0
    min_s: float = 0.0


class KvMethod(StrEnum):
    RECOMPUTE = "recompute"
    TRANSFER = "transfer"


@dataclass(frozen=True, slots=True, kw_only=True)
class KvDecision:
    method: KvMethod
    recompute_s: float
    transfer_s: float
    reason: str


def decide_kv(tokens: int, layers: int, costs: KvCosts) -> KvDecision:
    """Decide how a sequence of `tokens` tokens gets its K and V on this node.

    `layers` is the number of layers to transfer. Recomputing takes a whole prefill however few they are:
    each layer needs the output of the one before.
    """
    nbytes = tokens * layers * costs.token_layer_bytes
    recompute_s = tokens / costs.prefill_tokens_per_s
    transfer_s = costs.latency_s + nbytes / costs.link_bytes_per_s if costs.link_bytes_per_s > 0 else inf
    transfer_s = max(transfer_s, costs.min_s)
    method = KvMethod.TRANSFER if transfer_s < recompute_s else KvMethod.RECOMPUTE
    reason = (
        f"{method}: recomputing {tokens} tokens takes {_seconds(recompute_s)}, "
        f"transferring {nbytes / 1e6:.1f} MB of {layers} layers {_seconds(transfer_s)}"
    )
    return KvDecision(method=method, recompute_s=recompute_s, transfer_s=transfer_s, reason=reason)


class PrefillRate:
    """The prefill throughput of one instance: the maximum over its steps.

    Steps that decode, wait or are disturbed say nothing about prefill.
    """

    def __init__(self) -> None:
        self._token_layers_per_s = 0.0

    def __repr__(self) -> str:
        return f"<PrefillRate {self._token_layers_per_s:.0f} tokens x layers / s>"

    def record(self, tokens: int, layers: int, seconds: float) -> None:
        if seconds > 0:
            self._token_layers_per_s = max(self._token_layers_per_s, tokens * layers / seconds)

    def tokens_per_s(self, layers: int) -> float | None:
        """Return the throughput through `layers` layers; None before the first step."""
        return self._token_layers_per_s / layers if self._token_layers_per_s else None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Estimate(Generic[T]):
    value: T
    until_s: float


class KvLinkRates:
    """Measured rates of KV transfers, by the set of hosts that sent in parallel; `assumed` until then.

    They are not those of casts: K and V use the stages' connections, beside the weights and without a cap.
    Estimates expire after a minute: a link that seems slow is not used, so its recovery would go unnoticed.
    Only the second timeout within a minute counts: at the first, the export may not have been finished.
    """

    def __init__(self, assumed: LinkRate | None = None, now_s: Callable[[], float] = time.monotonic) -> None:
        self._assumed = assumed or LinkRate()
        self._now_s = now_s
        self._rates: dict[frozenset[str], _Estimate[LinkRate]] = {}
        self._timeouts_s: dict[frozenset[str], _Estimate[float]] = {}  # 0 if there was one only

    def __repr__(self) -> str:
        return f"<KvLinks {self._rates}>"

    def record_transfer(self, hosts: frozenset[str], nbytes: int, seconds: float) -> None:
        """Record `nbytes` received from all hosts together."""
        self._timeouts_s.pop(hosts, None)
        if nbytes >= _MEASURED_BYTES and seconds > 0:
            before = self._known(self._rates, hosts) or self._assumed
            self._remember(self._rates, hosts, before.observe(nbytes / seconds))

    def record_timeout(self, hosts: frozenset[str], seconds: float) -> None:
        """Record that the transfer was not complete after `seconds`."""
        is_first = self._known(self._timeouts_s, hosts) is None
        self._remember(self._timeouts_s, hosts, 0.0 if is_first else seconds)

    def bytes_per_s(self, hosts: frozenset[str]) -> float:
        return (self._known(self._rates, hosts) or self._assumed).bytes_per_s

    def min_s(self, hosts: frozenset[str]) -> float:
        """Return the lower bound of a transfer's duration."""
        return self._known(self._timeouts_s, hosts) or 0.0

    def _remember(
        self, estimates: dict[frozenset[str], _Estimate[T]], hosts: frozenset[str], value: T
    ) -> None:
        now_s = self._now_s()
        for old in [one for one, estimate in estimates.items() if estimate.until_s <= now_s]:
            del estimates[old]
        estimates[hosts] = _Estimate(value=value, until_s=now_s + _ESTIMATE_TTL_S)

    def _known(self, estimates: dict[frozenset[str], _Estimate[T]], hosts: frozenset[str]) -> T | None:
        estimate = estimates.get(hosts)
        return None if estimate is None or estimate.until_s <= self._now_s() else estimate.value


def _seconds(seconds: float) -> str:
    if seconds == inf:
        return "forever"
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"
