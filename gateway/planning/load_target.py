"""The load target: as many instances as the waiting prompts, the decode steps and the KV cache need. Pure.

Capacity is what instances were seen to do. The predicted time to first token of the last waiting prompt is
compared with the target; so are, for the time that a further start takes, the prompts that will arrive.
"""

import math
from dataclasses import dataclass, replace
from itertools import chain, islice

from gateway.planning.policy import (
    ConcurrencyTarget,
    FunctionLoad,
    PolicyState,
    ScalerPolicy,
    ScalingDecision,
    calls_reason,
    clamp,
    floor_of,
)
from gateway.planning.roles import RoleNeed
from gateway.planning.work import Trend, finish_s, instances_for, short_s
from registry.records.function import ScaleDown, ScalingMode, ServingMode

_LEAST_KEPT_S = 0.2  # what a start and a stop cost besides: records, moves of calls


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadTargetSettings:
    """Constants of the load target.

    Of the target time to first token, waits may take `budget`, and `drain` where the ready instances run
    prompts within that time and faster than they arrive: after a short peak. Where a start takes longer, what
    waits then may take `rush` of that once it is ready. An instance is surplus if the others would be busy
    for at most `busy` of their time at the recent rate of arrivals, and if sequences and their KV cache,
    times `margin`, fit without it. `kv_share` of a KV cache is used.
    """

    budget: float = 0.35
    drain: float = 0.6
    rush: float = 1.0
    busy: float = 0.9
    margin: float = 1.2
    kv_share: float = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """A number of instances with the reason for it; `roles` are its parts, if instances have roles."""

    instances: int
    reason: str
    roles: RoleNeed | None = None


class LoadTarget:
    """A policy that keeps the time to first token, the time between tokens and the KV cache within targets.

    It scales up at once, by several instances in one step, but starts none that would be ready only when the
    others have done the work. It scales down to the most that was needed within a window: the time that a
    further start would take, or `scale_down_delay_s`. With a delay, what was stopped and soon needed again is
    kept for `keep_alive_s` or longer. The last instance stays for `keep_alive_s` without calls. Until its
    instances were seen at work, it keeps `target_concurrency` calls on each.
    """

    def __init__(self, settings: LoadTargetSettings | None = None) -> None:
        self._settings = settings or LoadTargetSettings()

    def decide(self, load: FunctionLoad, state: PolicyState, now: float) -> ScalingDecision:
        asleep = state.asleep and load.held == 0
        low = 0 if asleep else load.scaling.min_instances
        trend, need = self._observed(load, state, now, asleep=asleep)
        state = _completing(load, state, asleep=asleep)
        floor, floor_until = floor_of(load, state, now)
        times = [] if floor_until is None else [floor_until]
        desired = replace(need, instances=clamp(need.instances, low, load.cap))
        if load.live > desired.instances and not (asleep or state.cut):
            desired = self._kept(load, trend, desired, low, now)
            times += self._falls_at(load, trend, desired.instances)
        if floor > desired.instances:
            desired = Need(instances=floor, reason=f"set to {floor}")
        instances = min(desired.instances, load.cap)
        return ScalingDecision(
            desired=instances,
            reason=desired.reason,
            state=PolicyState(
                floor=floor,
                floor_until=floor_until,
                completing=state.completing and floor_until is None,
                asleep=asleep,
                trend=trend.with_step(load.live, instances, now, load.scaling.keep_alive_s),
            ),
            next_at=min((at for at in times if now < at < math.inf), default=None),
            roles=need.roles,
        )

    def _observed(
        self, load: FunctionLoad, state: PolicyState, now: float, *, asleep: bool
    ) -> tuple[Trend, Need]:
        """Return the trend with what is needed now, and the number without which a target would be missed."""
        trend = _followed(load, state, now, _window_s(load))
        need = Need(instances=0, reason="asleep until the next call") if asleep else self._need(load, trend)
        keep = 0 if asleep else max(need.instances, self._keep(load, trend))
        trend = trend.with_need(keep, now, _hold_s(load, trend))
        busy = load.in_flight + load.held or load.starting
        idle_since = None if busy else now if trend.idle_since is None else trend.idle_since
        return replace(trend, idle_since=idle_since), need

    # --- up

    def _need(self, load: FunctionLoad, trend: Trend) -> Need:
        """Return the number without which a target would be missed."""
        calls, capacity, target = load.in_flight + load.held, load.capacity, load.scaling.target_concurrency
        if not calls:
            return Need(instances=0, reason="no calls")
        uncounted = math.ceil(load.tokens.uncounted / target)
        if not capacity.prefill_tokens_s:
            reason = f"{calls_reason(calls, target)}, as no instance was seen at work yet"
            return Need(instances=math.ceil(calls / target), reason=reason)
        prefill, batch, kv = self._prefill(load, trend), self._batch(load, trend), self._kv(load, trend)
        decode = max(batch, kv, key=lambda need: need.instances)
        most = max(prefill, decode, key=lambda need: need.instances)
        if load.scaling.serving is ServingMode.DISAGGREGATED:
            most = _by_role(prefill, decode, self._decoding(load, trend))
        if uncounted >= most.instances:
            return Need(instances=uncounted, reason=calls_reason(load.tokens.uncounted, target))
        return most

    def _prefill(self, load: FunctionLoad, trend: Trend) -> Need:
        """Return the number for the prompts that wait, and for those that arrive while a start takes."""
        tokens, rate, next_s = load.tokens, load.capacity.prefill_tokens_s, load.starts.next_s
        budget_s = self._budget_s(load, trend)
        present = _ready_s(load)
        waits_s = finish_s(tokens.waiting, rate, present)
        # Decode instances too: a change of role takes no time.
        able = [0.0] * (load.ready - load.prompt_runners) + present
        arriving = trend.arriving(next_s)
        # Only queued calls, and those that arrive, can go to a further instance.
        most = load.live + load.held + math.ceil(arriving / tokens.prompt_tokens)
        if not load.live:
            most = max(1, most)
        count = instances_for(tokens.waiting, rate, able, budget_s, load.live)
        if waits_s > budget_s:
            goal_s = max(budget_s, next_s + self._settings.rush * budget_s)
            count = max(count, instances_for(tokens.waiting, rate, _all_s(load, able), goal_s, most))
        later_s = finish_s(tokens.waiting + arriving, rate, present)
        if arriving and later_s > next_s + budget_s:
            # More than now arrive in that time: the number must also keep up with them.
            coming = instances_for(
                tokens.waiting + arriving, rate, _all_s(load, able), next_s + budget_s, most
            )
            count = max(count, min(most, max(coming, math.ceil(arriving / next_s / rate))))
        wait = "no instance" if math.isinf(waits_s) else f"a wait of {_seconds(waits_s)}"
        return Need(
            instances=max(1, count),
            reason=f"{tokens.waiting} prompt tokens wait at {rate:.0f}/s each: {wait}, "
            f"target {_seconds(load.scaling.ttft_target_s)}",
        )

    def _budget_s(self, load: FunctionLoad, trend: Trend) -> float:
        """Return how long waits may take: longer where a queue drains, as the ready instances keep up."""
        settings, target_s = self._settings, load.scaling.ttft_target_s
        rate = load.prompt_runners * load.capacity.prefill_tokens_s
        drains = trend.short < rate * settings.busy and load.tokens.waiting <= rate * target_s
        return (settings.drain if drains else settings.budget) * target_s

    def _batch(self, load: FunctionLoad, trend: Trend) -> Need:
        """Return the number for the sequences: their decode steps within the target, and the slots."""
        calls, tbt_s = load.in_flight + load.held, load.scaling.tbt_target_s
        decodes = max(1, load.capacity.max_decodes(tbt_s))
        count = 0 if math.isinf(decodes) else math.ceil(calls / int(decodes))
        reason = f"{calls} sequences, {decodes:.0f} each within {_seconds(tbt_s)} a token"
        slots = self._shared(load, trend, calls, load.capacity.slots)
        if slots > count:
            count, reason = slots, f"{calls} calls, {load.capacity.slots} slots each"
        return Need(instances=count, reason=reason)

    def _kv(self, load: FunctionLoad, trend: Trend) -> Need:
        """Return the number for the KV cache of all calls."""
        capacity = load.capacity
        each = int(capacity.kv_tokens * self._settings.kv_share)
        count = self._shared(load, trend, load.tokens.kv_tokens, each)
        if each and load.ready and capacity.kv_used_tokens > load.ready * each:
            count = max(count, math.ceil(capacity.kv_used_tokens / each))
        return Need(
            instances=count, reason=f"{load.tokens.kv_tokens} tokens of KV cache, {capacity.kv_tokens} each"
        )

    def _decoding(self, load: FunctionLoad, trend: Trend) -> int:
        """Return the number of instances for the calls that decode now, or do so after the prompts that run.

        Prompts that wait need instances to run them first: with those counted here, a long queue would leave
        none to run it.
        """
        tokens = load.tokens
        if not load.in_flight:
            return 1
        kv_tokens = max(0, tokens.kv_tokens - tokens.held_tokens)
        now = replace(load, held=0, tokens=replace(tokens, held_tokens=0, kv_tokens=kv_tokens))
        return max(self._batch(now, trend).instances, self._kv(now, trend).instances)

    def _shared(self, load: FunctionLoad, trend: Trend, amount: int, each: int) -> int:
        """Return the number for an amount of something that calls hold for their time on an instance.

        What is too much waits until others end, so that a little too much waits shortly. While a further
        instance starts, calls arrive and others end.
        """
        service_s, calls = load.tokens.service_s, load.in_flight + load.held
        if not each:
            return 0
        budget_s = self._budget_s(load, trend)
        patience, further = 1.0, load.held
        soon = float(amount)
        if service_s is not None:
            service_s, next_s = max(service_s, 1e-6), load.starts.next_s
            patience = (service_s + budget_s) / service_s
            arriving = trend.arriving(next_s) / load.tokens.prompt_tokens
            # Of those that arrive meanwhile, the ones of the last `service_s` are still there.
            stay = min(1.0, service_s / next_s) if next_s else 1.0
            soon = max(soon, soon * (1 + stay * arriving / calls - min(1.0, next_s / service_s)))
            further += math.ceil(arriving)
        present = math.ceil(amount / each)
        if not load.live:
            return math.ceil(soon / each / patience)
        wanted = math.ceil(soon / each / patience)
        return max(min(present, load.live), min(wanted, max(load.live, load.ready + further)))

    # --- down

    def _keep(self, load: FunctionLoad, trend: Trend) -> int:
        """Return the number below which the recent load would not fit with a margin."""
        settings, capacity, calls = self._settings, load.capacity, load.in_flight + load.held
        if not capacity.prefill_tokens_s:
            return 0
        shares = [calls / max(1.0, capacity.max_decodes(load.scaling.tbt_target_s))]
        if capacity.kv_tokens:
            used = max(load.tokens.kv_tokens, capacity.kv_used_tokens)
            shares.append(used / (capacity.kv_tokens * settings.kv_share))
        if capacity.slots:
            shares.append(calls / capacity.slots)
        prompts = trend.short / (capacity.prefill_tokens_s * settings.busy)
        held = max(shares) * settings.margin
        if load.scaling.serving is ServingMode.DISAGGREGATED and max(prompts, held) > 1.05:
            return math.ceil(prompts - 0.05) + math.ceil(held - 0.05)
        # What was a full instance may leave a trace in an average, but needs none.
        count = math.ceil(max(prompts, held) - 0.05)
        # With fewer instances each has more sequences, so its steps and all calls take longer.
        while 1 <= count < load.ready:
            longer = capacity.step_s(calls / count) / capacity.step_s(calls / load.ready)
            if max(prompts, held) * longer <= count:
                break
            count += 1
        return count

    def _kept(self, load: FunctionLoad, trend: Trend, desired: Need, low: int, now: float) -> Need:
        """Return the number that stays for some time of a surplus over what is desired."""
        window_s, hold_s = _window_s(load), _hold_s(load, trend)
        last_until = _last_until(load, trend)
        recent = trend.max_need(now, window_s)
        # As a step below it was soon taken back; no rare peaks.
        usual = min(trend.level, trend.max_need(now, hold_s), int(trend.usual * self._settings.margin + 1))
        held = usual if now < last_until else 0
        kept = clamp(max(recent, held), max(low, desired.instances), load.live)
        if kept > desired.instances:
            within_s = window_s if kept <= recent else hold_s
            reason = f"{kept} needed within {_seconds(within_s)}: {desired.reason}"
            return Need(instances=kept, reason=reason)
        if not desired.instances and now < last_until:
            reason = "starting" if trend.idle_since is None else "the last instance is kept alive"
            return Need(instances=1, reason=reason)
        return desired

    def _falls_at(self, load: FunctionLoad, trend: Trend, desired: int) -> list[float]:
        """Return when, without further calls, fewer than the desired instances will be kept."""
        windows = (_window_s(load), _hold_s(load, trend))
        times = [_last_until(load, trend), *(at + one for at, _ in trend.needs[:-1] for one in windows)]
        return times + self._rate_falls_at(load, trend, desired)

    def _rate_falls_at(self, load: FunctionLoad, trend: Trend, desired: int) -> list[float]:
        """Return when, without further calls, the rate of arrivals will need one instance less."""
        each = load.capacity.prefill_tokens_s * self._settings.busy
        disaggregated = load.scaling.serving is ServingMode.DISAGGREGATED
        fits = ((load.prompt_runners if disaggregated else desired) - 1 + 0.05) * each
        if desired < 1 or not each or trend.short <= fits:
            return []
        return [trend.at + short_s(_window_s(load)) * math.log(trend.short / max(fits, 1e-9)) + 1e-3]


class PolicyBySetting:
    """The policy that a function's settings name."""

    def __init__(self) -> None:
        policies: dict[ScalingMode, ScalerPolicy] = {
            ScalingMode.CONCURRENCY: ConcurrencyTarget(),
            ScalingMode.LOAD: LoadTarget(),
        }
        self._policies = policies

    def decide(self, load: FunctionLoad, state: PolicyState, now: float) -> ScalingDecision:
        return self._policies[load.scaling.policy].decide(load, state, now)


def _by_role(prefill: Need, decode: Need, decoding: int) -> Need:
    """Return the number for both roles; an instance that is enough for both needs no other.

    Instances to decode are started for all calls, so that they are there when the prompts have been run, but
    only `decoding` have that role now (BlitzScale §5.4).
    """
    counts = max(1, prefill.instances), max(1, decode.instances)
    roles = RoleNeed(prefill=counts[0], decode=max(1, min(decoding, counts[1])))
    if counts == (1, 1):
        return replace(prefill, roles=roles)
    reason = f"{counts[0]} for prompts ({prefill.reason}), {counts[1]} to decode ({decode.reason})"
    return Need(instances=sum(counts), reason=reason, roles=roles)


def _window_s(load: FunctionLoad) -> float:
    """Return for how long a surplus is kept.

    Kept for as long as its start would take, it costs at most twice what stopping at the best moment would
    (the rent-or-buy rule of ski rental).
    """
    scaling, delay_s = load.scaling, load.scaling.scale_down_delay_s
    if scaling.scale_down is ScaleDown.START:
        delay_s = max(_LEAST_KEPT_S, load.starts.start_s)
    return min(delay_s, scaling.keep_alive_s)


def _hold_s(load: FunctionLoad, trend: Trend) -> float:
    """Return for how long what was stopped too early before is kept now."""
    window_s = _window_s(load)
    if load.scaling.scale_down is ScaleDown.START:
        return window_s  # too early is what a start costs, which the window is
    return max(window_s, trend.hold_s(load.scaling.keep_alive_s)) if trend.level else window_s


def _last_until(load: FunctionLoad, trend: Trend) -> float:
    """Return until when the last instance stays without calls."""
    return math.inf if trend.idle_since is None else trend.idle_since + load.scaling.keep_alive_s


def _completing(load: FunctionLoad, state: PolicyState, *, asleep: bool) -> PolicyState:
    """Return the state with what another controller started, perhaps on request, as its floor."""
    if state.trend is not None or not load.starting or asleep or state.cut:
        return state
    floor, completing = max(state.floor, load.live), state.floor < load.live
    return replace(state, floor=floor, floor_until=None, completing=completing)


def _followed(load: FunctionLoad, state: PolicyState, now: float, window_s: float) -> Trend:
    """Return the trend at `now`; one that begins needs all present instances."""
    if state.trend is None:
        arrived = load.tokens.arrived_tokens if load.tokens.arrived_calls else None
        return Trend(at=now, arrived=arrived, needs=((now, load.live),), usual=load.live)
    return state.trend.with_usual(now, load.scaling.keep_alive_s).with_arrivals(load.tokens, now, window_s)


def _ready_s(load: FunctionLoad) -> list[float]:
    """Return when the present instances are ready, in seconds from now, soonest first."""
    known = sorted(load.starting_s)[: load.starting]
    unknown = [load.starts.next_s] * (load.starting - len(known))
    return [0.0] * load.prompt_runners + sorted(known + unknown)


def _all_s(load: FunctionLoad, present: list[float]) -> list[float]:
    """Return when the present instances and further ones would be ready, at most as many as are allowed."""
    further = islice(load.starts.ready_s(), max(0, load.cap - load.live))
    return sorted(chain(present, further))


def _seconds(value: float) -> str:
    return f"{value:.2g} s" if value < 9.95 else f"{value:.0f} s"
