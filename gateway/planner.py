"""From what is known to what is to be done: scaling, placement and redeploys as one pure step.

The planner remembers what it asked for until the directory shows it, so that a start under way is
never asked for twice. `plan` returns actions; whoever carries them out reports back through
`started`, `failed`, `no_room`, `stop_failed`, `warmed` and `fetched`.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from gateway.actions import FetchVersion, GiveUp, StartOn, StopOn, WarmOn
from gateway.directory import Directory, VersionKey
from gateway.loads import function_loads, loading_nodes
from gateway.needs import Needs
from gateway.placement import (
    arena_room,
    choose_sources,
    choose_starts,
    choose_stops,
    image_need,
    impossible,
    sites,
    too_small,
)
from gateway.plan import KeyDemand, Penalty, Pending, Pins, Plan, PlannerSettings
from gateway.policy import FunctionLoad, Memory, ScalerPolicy, asked, give_up_floor
from gateway.room import choose_victims, is_leaving, reserved_bytes, used_images
from registry.function import FunctionVersion
from registry.instance import InstanceRecord
from registry.node import NodeRecord


class Planner:
    def __init__(
        self,
        policy: ScalerPolicy,
        new_id: Callable[[VersionKey], str],
        settings: PlannerSettings | None = None,
    ) -> None:
        self._policy = policy
        self._new_id = new_id
        self._settings = settings or PlannerSettings()
        self._memories: dict[VersionKey, Memory] = {}
        self._current: dict[str, int] = {}
        self._retiring: set[VersionKey] = set()
        self._pins: dict[VersionKey, Pins] = {}
        self._wishes: dict[str, float] = {}
        self._penalties: dict[tuple[VersionKey, str], Penalty] = {}
        self._fetching: set[VersionKey] = set()
        self._needs = Needs()
        self._stuck: dict[VersionKey, float] = {}  # no start can be made: when to tell that
        self._was_stuck: dict[VersionKey, float] = {}  # the same at the step before
        self.pending: dict[str, Pending] = {}
        self.stopping: dict[str, str] = {}  # instance -> node
        self.warming: dict[tuple[str, str], None] = {}  # (image, node), oldest first

    def __repr__(self) -> str:
        return (
            f"<Planner pending={len(self.pending)} stopping={len(self.stopping)} warming={len(self.warming)}>"
        )

    # --- the step

    def plan(
        self,
        directory: Directory,
        demands: Mapping[VersionKey, KeyDemand],
        in_flight: Mapping[str, int],
        now: float,
    ) -> Plan:
        """What to do now. `in_flight` are this gateway's calls by instance (others' are not known)."""
        self._settle(directory, now)
        self._needs.forget_old(now)
        self._hear(directory, now)
        plan = Plan()
        self._stop_orphans(directory, plan)
        loads = function_loads(directory, demands, self.pending.values(), self.stopping)
        self._was_stuck, self._stuck = self._stuck, {}
        for key in self._switch(directory, loads):
            self._plan_key(key, directory, loads, in_flight, plan, now)
        return plan

    def _settle(self, directory: Directory, now: float) -> None:
        """Forget what the directory shows by now, or never will."""
        for instance_id, pending in list(self.pending.items()):
            entry = directory.node(pending.node)
            shown = directory.instance(instance_id) is not None
            late = pending.until is not None and now >= pending.until
            if shown or late or entry is None:
                del self.pending[instance_id]
        for instance_id in [i for i in self.stopping if directory.instance(i) is None]:
            del self.stopping[instance_id]
        for function in [f for f in self._current if f not in directory.functions]:
            del self._current[function]
            for key in [k for k in self._memories if k.function == function]:
                self._forget(key)

    def _forget(self, key: VersionKey) -> None:
        self._memories.pop(key, None)
        self._pins.pop(key, None)
        self._retiring.discard(key)
        for pair in [pair for pair in self._penalties if pair[0] == key]:
            del self._penalties[pair]

    def _hear(self, directory: Directory, now: float) -> None:
        """Take up the operators' wishes, each once, and none from before this controller's time."""
        for wish in directory.wishes:
            target = wish.target
            if now - wish.arrived_s > self._settings.wish_age_s or target.token in self._wishes:
                continue
            self._wishes[target.token] = wish.arrived_s
            head = directory.functions.get(target.function)
            if head is None:
                continue
            key = VersionKey(target.function, head.current)
            self._memories[key] = asked(self._memories.get(key, Memory()), target.instances)
            self._pins.pop(key, None)
            if target.on and target.instances:
                self._pins[key] = Pins(on=target.on, instances=target.instances)
            for pair in [pair for pair in self._penalties if pair[0] == key]:
                del self._penalties[pair]
        old = now - 2 * self._settings.wish_age_s
        self._wishes = {token: at for token, at in self._wishes.items() if at > old}

    def _stop_orphans(self, directory: Directory, plan: Plan) -> None:
        """Stop the instances of deleted functions."""
        for instance in directory.instances():
            if instance.function not in directory.functions:
                self._stop(instance, directory, plan, self._settings.delete_grace_s)

    def _switch(self, directory: Directory, loads: Mapping[VersionKey, FunctionLoad]) -> list[VersionKey]:
        """Note which versions became current; return the keys in planning order.

        A new current version gets as many instances as the load of the one before needs, if that one
        was ready: they start first, and the old ones go once these are ready.
        """
        for name, head in directory.functions.items():
            before = self._current.get(name)
            self._current[name] = head.current
            new = VersionKey(name, head.current)
            self._retiring.discard(new)
            olds = [key for key in loads if key.function == name and key != new]
            if before is None:  # this controller's first look: whatever is not current is on its way out
                self._retiring.update(key for key in olds if loads[key].live)
            elif before != head.current:
                old = VersionKey(name, before)
                load = loads.get(old)
                if load is not None and load.live:
                    self._retiring.add(old)
                    if load.ready:
                        self._start_ahead(new, load)
        for key in [k for k in self._retiring if k not in loads or not loads[k].live]:
            self._forget(key)
        for key in [k for k in self._memories if k not in loads]:
            self._forget(key)
        # Current versions first, as old ones wait for them; those with calls waiting before others.
        return sorted(
            loads,
            key=lambda k: (k.version != directory.functions[k.function].current, -loads[k].held, str(k)),
        )

    def _start_ahead(self, new: VersionKey, load: FunctionLoad) -> None:
        """Ask for as many of the new current version as `load` of the old one needs."""
        known = self._memories.get(new, Memory())
        if not (known.cut and known.asleep):  # it was not scaled to zero this very moment
            needed = max(1, -(-(load.in_flight + load.held) // load.scaling.target_concurrency))
            self._memories[new] = Memory(floor=max(known.floor, needed), cut=known.cut)

    def _plan_key(
        self,
        key: VersionKey,
        directory: Directory,
        loads: Mapping[VersionKey, FunctionLoad],
        in_flight: Mapping[str, int],
        plan: Plan,
        now: float,
    ) -> None:
        load, memory = loads[key], self._memories.get(key, Memory())
        if key in self._retiring:
            current = VersionKey(key.function, directory.functions[key.function].current)
            if loads[current].ready < min(plan.desired.get(current, 0), loads[current].cap):
                return  # the old version stays until the new one is there
            load = replace(load, scaling=replace(load.scaling, keep_alive_s=0.0))
            memory = give_up_floor(memory)
        ready = [i for i in directory.ready(key) if i.instance_id not in self.stopping]
        coming = [i for i in directory.coming(key) if i.instance_id not in self.stopping]
        keep_on: tuple[str, ...] = ()
        pins = self._pins.get(key)
        if pins is not None and len({i.node for i in ready} & set(pins.on)) >= pins.instances:
            # The named nodes are ready: now the others are surplus, as if the number were set again.
            memory, keep_on, pins = asked(memory, pins.instances), pins.on, None
            del self._pins[key]
        decision = self._policy.decide(load, memory, now)
        self._memories[key] = decision.memory
        plan.desired[key] = decision.desired
        plan.again_at(decision.next_at)
        missing = decision.desired - load.live
        if pins is not None:
            there = {i.node for i in ready + coming} | {p.node for p in self.pending.values() if p.key == key}
            missing = min(pins.instances, decision.desired) - len(there & set(pins.on))
        if missing > 0:
            self._start(key, missing, load, directory, loads, in_flight, plan, now)
        surplus = load.live - decision.desired
        if pins is not None:  # until these are ready the others stay beside them
            surplus = 0
        if surplus > 0:
            for instance in choose_stops(surplus, ready, coming, in_flight=in_flight, keep_on=keep_on):
                self._stop(instance, directory, plan, self._settings.drain_grace_s)

    # --- starting

    def _start(
        self,
        key: VersionKey,
        count: int,
        load: FunctionLoad,
        directory: Directory,
        loads: Mapping[VersionKey, FunctionLoad],
        in_flight: Mapping[str, int],
        plan: Plan,
        now: float,
    ) -> None:
        version = directory.version(key)
        if version is None:
            if key not in self._fetching:
                self._fetching.add(key)
                plan.actions.append(FetchVersion(key=key))
            return
        nodes = list(directory.usable_nodes())
        if impossible(version, nodes):
            self._memories[key] = give_up_floor(self._memories[key])
            return
        free = self._free_nodes(key, nodes, directory, plan, now)
        pins = self._pins.get(key)
        if pins is not None:
            free = [node for node in free if node.id in pins.on]
        image = version.image
        loading = self.loading(directory, image) if image else []
        used, least = used_images(directory), self._needs.least_bytes(key)
        chosen = choose_starts(
            count,
            sites(
                version,
                free,
                used_images=used,
                reserved_bytes=self._reserved(directory),
                instances=Counter(i.node for i in directory.instances()),
                loading_hosts={node.host for node in loading},
                least_bytes=least,
                wish_bytes=self._needs.wish_bytes(version),
            ),
        )
        by_id = {node.id: node for node in nodes}
        targets = [by_id[site.id] for site in chosen]
        holders: Mapping[str, tuple] = {}
        if image and targets:
            sources = choose_sources(image, targets, nodes, loading)
            if sources.error:
                self._note_stuck(
                    version, sources.error, load, nodes, plan, now, now + self._settings.no_source_s
                )
                return
            holders = sources.holders
            if sources.loader is not None and sources.loader not in {t.id for t in targets}:
                self.warming[image, sources.loader] = None
                plan.actions.append(WarmOn(version=version, node=sources.loader, holders=()))
        for target in targets:
            instance_id = self._new_id(key)
            self.pending[instance_id] = Pending(key=key, node=target.id, image=image)
            plan.actions.append(
                StartOn(
                    instance_id=instance_id,
                    version=version,
                    node=target.id,
                    holders=holders.get(target.id, ()),
                    max_concurrency=self._settings.max_concurrency(version.task, load.scaling),
                    room_bytes=arena_room(target, image, used.get(target.id, ())),
                )
            )
        if least and not targets and (not load.held or all(too_small(n, version, least) for n in nodes)):
            self._note_stuck(version, self._needs.reason(key), load, nodes, plan, now, now)
        elif len(targets) < count and load.held and image:
            victims = choose_victims(
                version,
                free,
                directory,
                loads,
                in_flight=in_flight,
                reserved_bytes=self._reserved(directory),
                stopping=self.stopping,
                least_bytes=least,
            )
            for instance in victims:
                self._stop(instance, directory, plan, self._settings.drain_grace_s)

    def _note_stuck(
        self,
        version: FunctionVersion,
        reason: str,
        load: FunctionLoad,
        nodes: Sequence[NodeRecord],
        plan: Plan,
        now: float,
        tell_at: float,
    ) -> None:
        """No start can be made: give up what waits for one, if it is so at `tell_at` still."""
        key = VersionKey(version.function, version.version)
        due = self._stuck[key] = self._was_stuck.get(key, tell_at)
        if now < due:
            plan.again_at(due)
        elif load.held or self._memories[key].floor:
            self._stuck[key] = now + self._settings.penalty_s  # not anew before all gateways heard of it
            self._memories[key] = give_up_floor(self._memories[key])
            self._pins.pop(key, None)
            starts = {node.id: self._new_id(key) for node in nodes[: self._settings.max_starts]}
            plan.actions.append(GiveUp(version=version, starts=starts, reason=reason))

    def _free_nodes(
        self, key: VersionKey, nodes: list[NodeRecord], directory: Directory, plan: Plan, now: float
    ) -> list[NodeRecord]:
        """The nodes without an instance of this version and without a penalty for it.

        One that is leaving does not count: it may take as long as its calls, and another shares its image.
        """
        taken = {i.node for i in directory.instances(key) if not is_leaving(i, self.stopping)}
        taken |= {p.node for p in self.pending.values() if p.key == key}
        free = []
        for node in nodes:
            penalty = self._penalties.get((key, node.id))
            if node.id in taken:
                continue
            if penalty is not None and now < penalty.until:
                plan.again_at(penalty.until)
            else:
                free.append(node)
        return free

    def _stop(self, instance: InstanceRecord, directory: Directory, plan: Plan, grace_s: float) -> None:
        if instance.instance_id in self.stopping or directory.node(instance.node) is None:
            return
        self.stopping[instance.instance_id] = instance.node
        plan.actions.append(StopOn(instance_id=instance.instance_id, node=instance.node, grace_s=grace_s))

    def loading(self, directory: Directory, image: str) -> list[NodeRecord]:
        """Usable nodes on which the image is arriving, oldest first."""
        return loading_nodes(image, directory, self.warming, self.pending.values())

    def _reserved(self, directory: Directory) -> dict[str, int]:
        return reserved_bytes(directory, self.pending.values(), self._needs)

    # --- what became of it

    def started(self, instance_id: str, now: float) -> None:
        """The node says it is ready; its record must show up soon."""
        pending = self.pending.get(instance_id)
        if pending is not None:
            self.pending[instance_id] = replace(pending, until=now + self._settings.record_wait_s)
            self._penalties.pop((pending.key, pending.node), None)

    def failed(self, key: VersionKey, instance_id: str, node: str, now: float, *, at_fault: bool) -> None:
        """A start failed. Not `at_fault` if the node was lost: then its next life may try at once."""
        self.pending.pop(instance_id, None)
        count = self._penalties.get((key, node), Penalty(until=0.0, count=0)).count + 1
        wait_s = min(self._settings.max_penalty_s, self._settings.penalty_s * 2 ** (count - 1))
        if at_fault:
            self._penalties[key, node] = Penalty(until=now + wait_s, count=count)
        total = sum(p.count for (other, _), p in self._penalties.items() if other == key)
        if total >= self._settings.max_starts and key in self._memories:
            self._memories[key] = give_up_floor(self._memories[key])
            self._pins.pop(key, None)

    def no_room(self, action: StartOn, directory: Directory, reason: str, now: float) -> None:
        """The node's arena had no room for the start: more must be free next time."""
        self.pending.pop(action.instance_id, None)
        entry = directory.node(action.node)
        if entry is None:
            return
        used = used_images(directory).get(action.node, ())
        room = min(action.room_bytes, arena_room(entry.record, action.version.image, used))
        lacked = max(0, room - image_need(action.version, entry.record))
        self._needs.learn(action.key, lacked, reason, now)

    def put_off(self, instance_id: str) -> None:
        """A start was not made, through nobody's fault."""
        self.pending.pop(instance_id, None)

    def stop_failed(self, instance_id: str) -> None:
        """The node was not told: the instance counts again, and may be stopped again.

        A stop that succeeded stays noted until the record is gone, so that a late feed does not revive it.
        """
        self.stopping.pop(instance_id, None)

    def warmed(self, image: str, node: str) -> None:
        self.warming.pop((image, node), None)

    def fetched(self, key: VersionKey) -> None:
        self._fetching.discard(key)
