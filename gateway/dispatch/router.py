"""The choice of the replica for a call (pure).

Among instances the least loaded one below its limit; where pipelines are among them, the one that ends first.
"""

import math
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from gateway.cluster.replicas import PipelineReplica, Replica, serving_rates, slots_key_of
from gateway.core.prefix import rank
from gateway.dispatch.targets import RequestTarget, choose_target
from registry.records.instance import InstanceRecord

# Calls without a first token per pipeline stage, and per instance beside pipelines.
_MAX_FRESH = 2
# Prompt tokens of calls without a first token on a paced instance: what its next few steps run. All others
# wait at the gateway, from where they can also go to an instance that becomes ready meanwhile.
_MAX_FRESH_TOKENS = 1024
# In a pair the source's engine has some 2000 tokens, of which the target has run layers; it begins the next.
_PAIR_TOKENS = 8192
_PREFIX_BOUND = 1.25  # times the average calls of an instance
DEFAULT_CONCURRENCY = 8  # of a replica that reports no limit


class CallTokens(NamedTuple):
    """The tokens of a call that generates: of its prompt, and of its KV cache with the expected output."""

    prompt: int = 0
    kv: int = 0


NO_TOKENS = CallTokens()


class ReplicaChoice(msgspec.Struct, frozen=True, kw_only=True):
    """The replica for a call, or None; `next_at` is when a full one may be retried."""

    instance: Replica | None
    next_at: float | None = None


def concurrency_of(server: Replica) -> int:
    """Return the number of calls that the replica runs at once."""
    return server.max_concurrency or DEFAULT_CONCURRENCY


def overcommit_of(slots: int) -> int:
    """Return the number of over-commit slots, for tenants below their fair share.

    Such a tenant need not wait for a call of another to end; the others get no slot meanwhile.
    """
    return slots // 2


def spare_of(slots: int) -> int:
    """Return the number of slots that calls in the background leave free for others."""
    return slots // 4


@dataclass(slots=True)
class _ReplicaLoad:
    """The calls on one replica: `work` is their estimated cost in tokens, `fresh` have no first token.

    `fresh_tokens` are the prompts of the latter, `kv_tokens` is the KV cache that all take.
    """

    calls: int = 0
    work: int = 0
    fresh: int = 0
    fresh_tokens: int = 0
    kv_tokens: int = 0


_NO_LOAD = _ReplicaLoad()


class ReplicaSlots:
    """The slots that this gateway's calls hold, by `slots_key_of`, and the backoff of full replicas."""

    def __init__(self) -> None:
        self._loads: dict[str, _ReplicaLoad] = {}
        self._full_until: dict[str, float] = {}

    def __repr__(self) -> str:
        return f"<Slots {self._loads}>"

    @property
    def in_flight(self) -> Counter[str]:
        return Counter({key: load.calls for key, load in self._loads.items()})

    def acquire(self, key: str, cost: int = 1, tokens: CallTokens = NO_TOKENS) -> None:
        load = self._loads.get(key)
        if load is None:
            load = self._loads[key] = _ReplicaLoad()
        load.calls += 1
        load.work += cost
        load.fresh += 1
        load.fresh_tokens += tokens.prompt
        load.kv_tokens += tokens.kv

    def on_first_token(self, key: str, tokens: CallTokens = NO_TOKENS) -> None:
        """Record the first token of one of its calls."""
        self._loads[key].fresh -= 1
        self._loads[key].fresh_tokens -= tokens.prompt

    def release(
        self, key: str, cost: int = 1, tokens: CallTokens = NO_TOKENS, *, has_token: bool = False
    ) -> None:
        """Return the slot of a call, which has produced a token if `has_token`."""
        load = self._loads[key]
        load.calls -= 1
        load.work -= cost
        load.kv_tokens -= tokens.kv
        if not has_token:
            load.fresh -= 1
            load.fresh_tokens -= tokens.prompt
        if not load.calls:
            del self._loads[key]

    def _load(self, server: Replica) -> _ReplicaLoad:
        return self._loads.get(slots_key_of(server), _NO_LOAD)

    def back_off_until(self, instance_id: str, until: float) -> None:
        """Route no call to a replica that other gateways have filled until then."""
        self._full_until[instance_id] = until

    def room(self, server: Replica, *, over_commit: bool = False) -> int:
        """Return the number of free slots.

        A pipeline gets no more calls than keep it busy: others may form, and nodes become ready, at any time.
        """
        slots = concurrency_of(server)
        room = slots + (overcommit_of(slots) if over_commit else 0) - self._load(server).calls
        return min(room, self._backlog_room(server)) if _runs_in_turns(server) else room

    def _backlog_room(self, server: Replica) -> int:
        """Return how many more calls keep it busy until those without a first token have one."""
        stages = len(server.pipeline.stages) if isinstance(server, PipelineReplica) else 1
        return _MAX_FRESH * stages - self._load(server).fresh

    def _takes(self, server: Replica, tokens: CallTokens, *, over_commit: bool) -> bool:
        """Return whether the replica would run the prompt of a paced call soon, and has KV for it.

        In a pair both nodes run prompts. One with itself takes no more than an instance, as its calls stay
        there when other instances become ready.
        """
        load, factor = self._load(server), 2 if over_commit else 1
        if isinstance(server, PipelineReplica):
            if server.runs_in_turns:
                return True
            factor *= len(server.pipeline.stages)
        most_tokens = _MAX_FRESH_TOKENS * factor
        if isinstance(server, PipelineReplica) and not server.pipeline.is_alone:
            most_tokens = max(most_tokens, _PAIR_TOKENS)
        soon = load.fresh < _MAX_FRESH * factor or load.fresh_tokens + tokens.prompt <= most_tokens
        kv_tokens = server.kv_tokens if isinstance(server, InstanceRecord) else 0
        return soon and (not load.calls or not kv_tokens or load.kv_tokens + tokens.kv <= kv_tokens)

    def _keeps_up(self, server: Replica) -> bool:
        return isinstance(server, PipelineReplica) or self._backlog_room(server) > 0

    def choose_ready(
        self, ready: Sequence[InstanceRecord], rng: random.Random, now: float, prefix: int = 0
    ) -> InstanceRecord | None:
        """Return the least loaded of instances beside which no pipeline serves; None if all are full."""
        if len(ready) > 1 or self._full_until:
            chosen = self.choose(ready, rng, now, prefix=prefix).instance
            return chosen if isinstance(chosen, InstanceRecord) else None
        (only,) = ready
        return only if self._loads.get(only.instance_id, _NO_LOAD).calls < concurrency_of(only) else None

    def choose(
        self,
        ready: Iterable[Replica],
        rng: random.Random,
        now: float,
        *,
        over_commit: bool = False,
        cost: int = 1,
        paced: CallTokens | None = None,
        prefix: int = 0,
        background: bool = False,
    ) -> ReplicaChoice:
        """Return a replica with a free slot; with `over_commit` beyond its limit, if need be.

        Calls in the `background` leave some slots of each replica free.

        Calls of one `prefix` go to one instance while it has few more calls than the others have on average
        (consistent hashing with bounded loads, Mirrokni et al. 2016).

        `cost` is the call's cost in tokens; ties are broken by `rng`. Beside pipelines an instance also gets
        no more than keep it busy: it prefills its calls one by one, and a pipeline or a node that has become
        ready would end the last of them sooner. So does any instance for a `paced` call of these tokens.
        """
        ready = list(ready)
        beside_pipelines = any(map(_runs_in_turns, ready))
        if self._full_until:
            self._full_until = {id_: until for id_, until in self._full_until.items() if until > now}
        able: list[Replica] = []
        next_at = None
        for server in ready:
            until = self._full_until.get(server.instance_id)
            if until is not None:
                next_at = until if next_at is None else min(next_at, until)
            elif (
                self.room(server, over_commit=over_commit)
                > (spare_of(concurrency_of(server)) if background else 0)
                and (not beside_pipelines or self._keeps_up(server))
                and (paced is None or self._takes(server, paced, over_commit=over_commit))
            ):
                able.append(server)
        if any(isinstance(server, PipelineReplica) for server in able):
            return ReplicaChoice(instance=self._soonest(able, cost), next_at=next_at)
        chosen = self._by_prefix(able, prefix) if prefix else None
        if chosen is None:
            chosen = self._least_loaded(able, rng, paced is not None)
        return ReplicaChoice(instance=chosen, next_at=next_at)

    def _by_prefix(self, able: Sequence[Replica], prefix: int) -> Replica | None:
        """Return the instance that has the prefix, None if it is too loaded."""
        if not able:
            return None
        chosen = max(able, key=lambda server: rank(prefix, server.instance_id))
        calls = sum(self._load(server).calls for server in able)
        return chosen if self._load(chosen).calls <= _PREFIX_BOUND * (calls + 1) / len(able) else None

    def _least_loaded(self, able: Sequence[Replica], rng: random.Random, by_prompts: bool) -> Replica | None:
        best: list[Replica] = []
        best_load = math.inf
        for server in able:
            own = self._load(server)
            load = own.calls / concurrency_of(server)
            if by_prompts:  # a prompt ends sooner where no other is ahead of it
                load += own.fresh_tokens / _MAX_FRESH_TOKENS
            if load < best_load:
                best, best_load = [server], load
            elif load == best_load:
                best.append(server)
        return rng.choice(best) if best else None

    def _soonest(self, able: Sequence[Replica], cost: int) -> Replica | None:
        by_id = {server.instance_id: server for server in able}
        targets = [
            RequestTarget(name=server.instance_id, rate=rate, work_tokens=self._load(server).work)
            for server, rate in zip(able, serving_rates(able), strict=True)
        ]
        chosen = choose_target(targets, cost)
        return None if chosen is None else by_id[chosen.name]


def _runs_in_turns(server: Replica) -> bool:
    return isinstance(server, PipelineReplica) and server.runs_in_turns
