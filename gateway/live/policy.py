"""The decision whether and how a function serves while its model loads (pure)."""

from dataclasses import dataclass
from math import inf

from registry.records.live import LiveMode, LiveRecord

_MODES = (LiveMode.PIPELINE, LiveMode.ZIGZAG)  # of equals the pipeline: it takes nothing from ready instances
# How much sooner it must be: forecasts leave out what hops, openings and moves take of busy processors. With
# 1.1 the code trace misses more targets than without live serving (benchmarks/results/trace-live-gain-*).
_GAIN = 1.5


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveForecast:
    """Predicted seconds until all queued prompts have been run; infinite for never.

    `plain_s` is without serving live, `pipeline_s` and `zigzag_s` are with pipelines or pairs. `queued` is
    the number of waiting calls, and `basis` what the loads were predicted from. `can_grow`: only one instance
    loads, of which a pipeline can be made once others load too.
    """

    plain_s: float
    pipeline_s: float = inf
    zigzag_s: float = inf
    queued: int = 0
    can_grow: bool = False
    basis: str = ""

    def live_s(self, mode: LiveMode) -> float:
        """Return the time if the function serves live in that mode."""
        return self.pipeline_s if mode is LiveMode.PIPELINE else self.zigzag_s


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveDecision:
    """`way` is PIPELINE, ZIGZAG or OFF, `reason` states in one line why."""

    way: LiveMode
    reason: str

    @property
    def is_live(self) -> bool:
        return self.way is not LiveMode.OFF


def decision_of(record: LiveRecord) -> LiveDecision:
    """Return the decision that a published record states."""
    return LiveDecision(way=record.way, reason=record.reason)


def decide_live(
    setting: LiveMode, forecast: LiveForecast, ttft_target_s: float, before: LiveDecision | None = None
) -> LiveDecision:
    """Return how to serve: `auto` goes live when calls would miss the TTFT target, and clearly less so live.

    A function that is live stays so until its loads end (`before`), so the decision cannot flap.
    """
    if setting is LiveMode.OFF:
        return LiveDecision(way=LiveMode.OFF, reason="live is off")
    if before is not None and before.is_live:
        return before
    if setting is not LiveMode.AUTO:
        return _decide_fixed(setting, forecast)
    waiting = _describe_wait(forecast, ttft_target_s)
    if forecast.plain_s <= ttft_target_s:
        return LiveDecision(way=LiveMode.OFF, reason=waiting)
    best = min(_MODES, key=forecast.live_s)
    if forecast.live_s(best) * _GAIN < forecast.plain_s:
        return LiveDecision(way=best, reason=f"{waiting}; {_describe_modes(best, forecast)}")
    if forecast.can_grow:  # it costs nothing, and later loads need it
        return LiveDecision(way=LiveMode.PIPELINE, reason=f"{waiting}; nodes that load later can join it")
    modes = _describe_modes(best, forecast)
    reason = "no live mode is possible" if forecast.live_s(best) == inf else f"no sooner live: {modes}"
    return LiveDecision(way=LiveMode.OFF, reason=f"{waiting}; {reason}")


def _decide_fixed(setting: LiveMode, forecast: LiveForecast) -> LiveDecision:
    if setting is LiveMode.ZIGZAG and forecast.zigzag_s == inf:
        reason = "live is zigzag, but no ready instance is overloaded"
        return LiveDecision(way=LiveMode.OFF, reason=reason)
    if setting is LiveMode.PIPELINE and forecast.pipeline_s == inf and not forecast.can_grow:
        reason = "live is pipeline, but no loading nodes will hold all layers between them"
        return LiveDecision(way=LiveMode.OFF, reason=reason)
    return LiveDecision(way=setting, reason=f"live is {setting}")


def _describe_wait(forecast: LiveForecast, ttft_target_s: float) -> str:
    calls = f"{forecast.queued} queued calls wait" if forecast.queued else "a call waits"
    basis = f" ({forecast.basis})" if forecast.basis else ""
    return f"auto: {calls} {_seconds(forecast.plain_s)}, the TTFT target is {_seconds(ttft_target_s)}{basis}"


def _describe_modes(best: LiveMode, forecast: LiveForecast) -> str:
    waits = {LiveMode.PIPELINE: forecast.pipeline_s, LiveMode.ZIGZAG: forecast.zigzag_s}
    found = [f"{mode} {_seconds(waits[mode])}" for mode in _MODES if mode is not best and waits[mode] < inf]
    return ", ".join([f"{best} takes {_seconds(waits[best])}", *found])


def _seconds(seconds: float) -> str:
    if seconds == inf:
        return "forever"
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"
