"""The work of a function version in tokens, what its instances were seen to do, and how long work waits."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain, repeat

_LONG_S = 10.0  # the time constant of the slower rate of arrivals
_MAX_SHORT_S = 2.0
_MAX_PATIENCE = 4  # times the keep-alive, for which instances stay that were stopped too early before


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLoad:
    """The calls of a version in tokens, over all gateways.

    `held_tokens` are the prompt tokens of queued calls, `prefilling_tokens` those of calls on instances
    without a first token. `kv_tokens` is the KV cache that all of them take: prompts and expected outputs.
    `arrived_tokens` and `arrived_calls` count all calls so far, from any beginning: their growth and their
    ratio are used, and 0 calls mean that no counter was seen. `service_s` is the usual time of a call on an
    instance (None: unknown). `uncounted` are calls of gateways that report no tokens.
    """

    held_tokens: int = 0
    prefilling_tokens: int = 0
    kv_tokens: int = 0
    arrived_tokens: int = 0
    arrived_calls: int = 0
    service_s: float | None = None
    uncounted: int = 0

    @property
    def waiting(self) -> int:
        """The prompt tokens that have not been run."""
        return self.held_tokens + self.prefilling_tokens

    @property
    def prompt_tokens(self) -> float:
        """The usual length of a prompt."""
        return max(1.0, self.arrived_tokens / self.arrived_calls) if self.arrived_calls else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceCapacity:
    """What one instance of the version was seen to do; 0 for what was not seen.

    `prefill_tokens_s` is its rate while prompts wait, `decode_steps` are its step times by the number of
    sequences: (sequences, seconds), in increasing order. `kv_tokens` (in the mean) and `slots` bound what it
    runs at once.
    `kv_used_tokens` is what all instances together use of their KV cache.
    """

    prefill_tokens_s: float = 0.0
    decode_steps: tuple[tuple[int, float], ...] = ()
    kv_tokens: int = 0
    slots: int = 0
    kv_used_tokens: int = 0

    def step_s(self, sequences: float) -> float:
        """Return the time of a step of so many sequences, on a line through those seen; 1 if none was."""
        if not self.decode_steps:
            return 1.0
        (least, low_s), (most, high_s) = self.decode_steps[0], self.decode_steps[-1]
        slope_s = max(0.0, (high_s - low_s) / (most - least)) if most > least else 0.0
        return max(1e-6, low_s + slope_s * max(0.0, sequences - least))

    def max_decodes(self, tbt_s: float) -> float:
        """Return the number of sequences whose steps take `tbt_s`; infinite where nothing bounds it.

        Steps of more sequences than were seen are extrapolated by a line.
        """
        if not self.decode_steps:
            return math.inf
        within = [count for count, seconds in self.decode_steps if seconds <= tbt_s]
        (least, low_s), (most, high_s) = self.decode_steps[0], self.decode_steps[-1]
        if high_s > tbt_s:
            return max(within, default=1)
        slope_s = (high_s - low_s) / (most - least) if most > least else 0.0
        return most + (tbt_s - high_s) / slope_s if slope_s > 0 else math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class StartForecast:
    """When further instances would be ready, in seconds: first `hot` starts, then `warm` ones, then cold.

    Before these come `paused` instances, which finish their calls and can take others at once.
    """

    paused: int = 0
    hot: int = 0
    hot_s: float = 0.1
    warm: int = 0
    warm_s: float = 1.0
    cold_s: float = 5.0

    @property
    def next_s(self) -> float:
        """When the next instance would be ready."""
        return next(self.ready_s())

    @property
    def start_s(self) -> float:
        """How long the next start would take, were no instance paused."""
        return self.hot_s if self.hot else self.warm_s if self.warm else self.cold_s

    def ready_s(self) -> Iterator[float]:
        """Yield when each further instance would be ready if all are started now, soonest first."""
        known = chain(repeat(0.0, self.paused), repeat(self.hot_s, self.hot), repeat(self.warm_s, self.warm))
        return chain(known, repeat(self.cold_s))


NO_TOKENS, UNSEEN, USUAL_STARTS = TokenLoad(), InstanceCapacity(), StartForecast()


@dataclass(frozen=True, slots=True, kw_only=True)
class Trend:
    """The recent load of a version: rates of arriving prompt tokens, and the numbers of instances needed.

    `short` and `long` are exponential averages in tokens per second at time `at`, when `arrived` tokens had
    arrived (None: not counted yet). `needs` are (time, instances) of the numbers that no later one exceeds,
    oldest first.
    `idle_since` is when the last call ended, `down_at` when the last step down was. Up to `level` instances
    are kept for `patience` times the keep-alive, as a step down below that was taken back.
    `usual` is the recent mean of the needs.
    """

    at: float
    arrived: int | None = None
    short: float = 0.0
    long: float = 0.0
    needs: tuple[tuple[float, int], ...] = ()
    idle_since: float | None = None
    down_at: float = -math.inf
    level: int = 0
    patience: int = 1
    usual: float = 0.0

    def arriving(self, seconds: float) -> float:
        """Return the tokens that arrive in that time if arrivals go on, at most what has lately arrived."""
        return min(self.short * seconds, self.long * _LONG_S)

    def with_arrivals(self, tokens: TokenLoad, now: float, window_s: float) -> "Trend":
        """Return the trend at `now`.

        What waits has just arrived; what has arrived besides did so at any time since the last update.
        """
        if not tokens.arrived_calls:
            return self._with_growth(self.arrived, 0, 0, now, window_s)
        arrived = tokens.arrived_tokens
        growth = tokens.waiting if self.arrived is None else max(0, arrived - self.arrived)
        fresh = min(growth, tokens.waiting)
        return self._with_growth(arrived, fresh, growth - fresh, now, window_s)

    def _with_growth(
        self, arrived: int | None, fresh: int, earlier: int, now: float, window_s: float
    ) -> "Trend":
        passed = max(0.0, now - self.at)
        constants = (short_s(window_s), _LONG_S)
        short, long = (
            rate * math.exp(-passed / constant) + fresh / constant + _spread(earlier, passed, constant)
            for rate, constant in zip((self.short, self.long), constants, strict=True)
        )
        return replace(self, at=now, arrived=arrived, short=short, long=long)

    @property
    def last_need(self) -> int | None:
        """The latest number of instances needed."""
        return self.needs[-1][1] if self.needs else None

    def with_usual(self, now: float, over_s: float) -> "Trend":
        """Return the trend with the mean number needed until `now`; call this before it is updated."""
        if self.last_need is None:
            return self
        weight = math.exp(-max(0.0, now - self.at) / max(over_s, 1e-3))
        return replace(self, usual=self.last_need + (self.usual - self.last_need) * weight)

    def max_need(self, now: float, window_s: float) -> int:
        """Return the largest number that was needed within the window."""
        recent = (count for at, count in self.needs if at > now - window_s + 1e-6)
        return next(recent, self.needs[-1][1])

    def hold_s(self, keep_alive_s: float) -> float:
        """Return how long instances up to `level` are kept."""
        return keep_alive_s * self.patience

    def with_step(self, before: int, after: int, now: float, keep_alive_s: float) -> "Trend":
        """Return the trend after a decision that changes the number of instances."""
        since_s, hold_s = now - self.down_at, self.hold_s(keep_alive_s)
        if after < before:
            return replace(self, down_at=now)
        if after > before and since_s <= keep_alive_s * _MAX_PATIENCE:
            # Long enough for the time that has passed.
            least = max(2 * self.patience if self.level else 1, math.ceil(since_s / max(keep_alive_s, 1e-3)))
            patience = min(_MAX_PATIENCE, least)
            return replace(self, down_at=-math.inf, level=max(self.level, before + 1), patience=patience)
        if before < self.level and math.inf > since_s > hold_s:
            if self.patience == 1:
                return replace(self, down_at=-math.inf, level=0)
            return replace(self, down_at=now, patience=self.patience // 2)
        return self

    def with_need(self, instances: int, now: float, window_s: float) -> "Trend":
        """Return the trend with a need at `now`, without those before the window."""
        recent = [one for one in self.needs if one[0] > now - window_s + 1e-6 and one[1] > instances]
        return replace(self, needs=(*recent, (now, instances)))


def _spread(tokens: int, passed: float, constant: float) -> float:
    """Return what tokens that arrived evenly in the time passed add to an average."""
    return tokens / constant if passed <= 0 else tokens / passed * -math.expm1(-passed / constant)


def short_s(window_s: float) -> float:
    """Return the time constant of the short rate for a scale-down delay."""
    return min(_MAX_SHORT_S, max(0.5, window_s))


def finish_s(tokens: float, rate: float, ready_s: Iterable[float]) -> float:
    """Return when instances that are ready at these times (in increasing order) have run the tokens.

    An instance that would be ready only later than that does not count.
    """
    end_s, count, sum_s = math.inf, 0, 0.0
    for at_s in ready_s:
        if at_s >= end_s:
            break
        count, sum_s = count + 1, sum_s + at_s
        end_s = (tokens / rate + sum_s) / count
    return end_s


def queue_wait_s(
    tokens: TokenLoad, capacity: InstanceCapacity, *, queued: int, running: int, ready: int
) -> float:
    """Return how long the last of the queued calls waits for ready instances, infinite if that is unknown.

    The prompts before it are run, and calls beyond the slots and the KV cache wait until others end. Where no
    prompts were seen, all calls count for their usual time.
    """
    if not (queued and ready):
        return 0.0 if ready else math.inf
    calls, service_s = queued + running, tokens.service_s
    shares = [calls / (max(1, capacity.slots) * ready)]
    if not capacity.prefill_tokens_s:
        return math.inf if service_s is None else shares[0] * service_s
    if capacity.kv_tokens:
        shares.append(tokens.kv_tokens / (capacity.kv_tokens * ready))
    prompts_s = finish_s(tokens.waiting, capacity.prefill_tokens_s, [0.0] * ready)
    beyond = max(shares) - 1
    if beyond <= 0:
        return prompts_s
    return math.inf if service_s is None else max(prompts_s, beyond * service_s)


def instances_for(tokens: float, rate: float, ready_s: Iterable[float], goal_s: float, most: int) -> int:
    """Return how many of the instances are needed to run the tokens by `goal_s`.

    That is the smallest number that does, at most `most`, and never one that is ready only when the others
    have run them: then the goal is missed, and more do not help.
    """
    end_s, count, sum_s = math.inf, 0, 0.0
    for at_s in ready_s:
        if end_s <= goal_s or at_s >= end_s or count >= most:
            break
        count, sum_s = count + 1, sum_s + at_s
        end_s = (tokens / rate + sum_s) / count
    return count
