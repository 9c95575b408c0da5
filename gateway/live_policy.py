"""Whether a function serves while its model arrives, and in which way: a pure decision with its reason."""

from dataclasses import dataclass
from math import inf

from registry.live import Live


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """What is predicted for the last of the requests that wait now, in seconds.

    `wait_s` is until the first new instance holds everything, `pipeline_s` until the first pipeline of
    loading nodes does; infinite where none will. `queue_s` is until the instances that serve already come to
    it, infinite without any; `zigzag_s` is that with the help of a node that is loading. How long its prompt
    takes is in none of them. `alone`: no other node loads yet. `said`: in a few words, what the loads were
    predicted by.
    """

    wait_s: float
    pipeline_s: float = inf
    queue_s: float = inf
    zigzag_s: float = inf
    alone: bool = False
    said: str = ""

    @property
    def plain_s(self) -> float:
        """Until it begins if nobody goes live."""
        return min(self.wait_s, self.queue_s)

    def live_s(self, way: Live) -> float:
        """The same with one way of going live; those that serve alone still do."""
        sooner = {Live.PIPELINE: self.pipeline_s, Live.ZIGZAG: self.zigzag_s}.get(way, inf)
        return min(sooner, self.plain_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveDecision:
    """`way` is PIPELINE, ZIGZAG or OFF, `reason` one line that says why."""

    way: Live
    reason: str


def decide_live(setting: Live, outlook: Outlook, ttft_target_s: float | None) -> LiveDecision:
    """A set way is taken wherever it can be; `auto` goes live only for the function's target."""
    if setting is Live.OFF:
        return LiveDecision(way=Live.OFF, reason="live is off")
    if setting is not Live.AUTO:
        if _is_missing(setting, outlook) and not (setting is Live.PIPELINE and outlook.alone):
            return LiveDecision(way=Live.OFF, reason=f"live is {setting}, but {_why_not(setting)}")
        return LiveDecision(way=setting, reason=f"live is {setting}")
    if ttft_target_s is None:
        return LiveDecision(way=Live.OFF, reason="auto: the function has no TTFT target")
    return _automatic(outlook, ttft_target_s)


def _automatic(outlook: Outlook, target_s: float) -> LiveDecision:
    plain_s = outlook.plain_s
    waiting = (
        f"auto: waiting takes {_seconds(plain_s)} to the first token, the target is {_seconds(target_s)}"
        + (f" ({outlook.said})" if outlook.said else "")
    )
    if plain_s <= target_s:
        return LiveDecision(way=Live.OFF, reason=waiting)
    ways = (Live.PIPELINE, Live.ZIGZAG)
    way = min(ways, key=outlook.live_s)  # of equals the pipeline: it needs nobody who serves already
    if outlook.live_s(way) >= plain_s:
        if outlook.alone:  # it costs nothing, and those that follow need it
            return LiveDecision(way=Live.PIPELINE, reason=f"{waiting}; nodes that follow can serve with it")
        return LiveDecision(way=Live.OFF, reason=f"{waiting}; nothing is sooner")
    other = ways[1 - ways.index(way)]
    compared = "" if _is_missing(other, outlook) else f", {other} {_seconds(outlook.live_s(other))}"
    return LiveDecision(way=way, reason=f"{waiting}; {way} takes {_seconds(outlook.live_s(way))}{compared}")


def _is_missing(way: Live, outlook: Outlook) -> bool:
    return (outlook.pipeline_s if way is Live.PIPELINE else outlook.zigzag_s) == inf


def _why_not(way: Live) -> str:
    if way is Live.PIPELINE:
        return "no nodes that load will hold all layers between them"
    return "no overloaded instance is there to be helped"


def _seconds(seconds: float) -> str:
    if seconds == inf:
        return "for ever"
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"
