"""Which host keeps the cluster's copy of each deployed image: a pure step of the control loop.

Every image of a current version has one *keeper*, a host that evicts its copy after all others. A
host that holds the image already is chosen first, the one that keeps the fewest bytes. Where a start
would push kept copies out, other hosts become their keepers before it is made.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from gateway.actions import StartOn, UnkeepOn, WarmOn
from gateway.directory import Directory
from gateway.placement import choose_sources, choose_warm, host_room_bytes, kept_bytes
from gateway.plan import Plan
from gateway.planner import Planner
from gateway.retries import Retries
from registry.function import FunctionVersion
from registry.node import NodeRecord, Tier

_ASK_S = 2.0  # until an unkeep that shows no effect is asked for again
_DEPLOYING_S = 30.0  # a kept copy of no current version may be one of a deploy under way
_RELIEF_S = 10.0  # how long a start waits for kept copies to find another keeper


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """One host's copy of an image; `node` is that of its nodes through which the host is asked."""

    image: str
    host: str
    node: str
    nbytes: int
    last_used_at: float
    kept: bool


Copies = Mapping[str, Mapping[str, Copy]]  # by image, then by host


def host_copies(nodes: Iterable[NodeRecord]) -> Copies:
    """The complete copies in the nodes' host memory."""
    copies: dict[str, dict[str, Copy]] = {}
    for node in nodes:
        for holding in node.holdings:
            if Tier.HOST not in holding.tiers:
                continue
            hosts = copies.setdefault(holding.image, {})
            known = hosts.get(node.host)
            if known is None or (known.last_used_at, known.node) < (holding.last_used_at, node.id):
                hosts[node.host] = Copy(
                    image=holding.image,
                    host=node.host,
                    node=node.id,
                    nbytes=holding.bytes,
                    last_used_at=holding.last_used_at,
                    kept=holding.kept,
                )
    return copies


class Keepers:
    def __init__(self, planner: Planner, retries: Retries) -> None:
        self._planner = planner
        self._retries = retries
        self._asked: dict[tuple[str, str], float] = {}  # (image, node) of unkeeps -> when to ask again
        self._moving: dict[str, str] = {}  # image -> the host that is to keep it no more
        self._waiting: dict[str, float] = {}  # host -> since when starts there wait for relief

    def __repr__(self) -> str:
        return f"<Keepers moving={len(self._moving)} waiting={sorted(self._waiting)}>"

    # --- designation

    def designate(self, directory: Directory, plan: Plan, now: float, wall: float) -> None:
        """See to it that each held image of a current version has one keeper, and nothing else has any."""
        nodes = list(directory.usable_nodes())
        copies = host_copies(nodes)
        self._asked = {
            (image, node): until
            for (image, node), until in self._asked.items()
            if any(copy.kept and copy.node == node for copy in copies.get(image, {}).values())
        }
        weights = Counter({node.host: kept_bytes(node) for node in nodes})
        current = current_versions(directory)
        self._moving = {i: host for i, host in self._moving.items() if i in copies and i in current}
        for image, hosts in copies.items():
            keepers = [copy for copy in hosts.values() if copy.kept]
            version = current.get(image)
            if version is None:
                self._release(image, keepers, directory, plan, now, wall)
            elif not keepers:
                self._choose(version, hosts.values(), directory, weights, plan, now)
            elif len(keepers) == 1:
                if all(image != arriving for arriving, _ in self._planner.warming):
                    self._moving.pop(image, None)
            else:
                leaving = self._moving.get(image)
                keepers.sort(key=lambda copy: (copy.host == leaving, weights[copy.host], copy.host))
                for copy in keepers[1:]:
                    self._unkeep(copy, plan, now)
        self._balance(nodes, copies, directory, plan, now)

    def _balance(
        self, nodes: list[NodeRecord], copies: Copies, directory: Directory, plan: Plan, now: float
    ) -> None:
        """Move one kept copy from the host that keeps most to the one that keeps least, while nothing
        else is under way: nodes do not all join at once, and the first one got them all."""
        busy = self._moving or self._planner.warming or self._planner.pending
        hosts = sorted({node.host: node for node in nodes}.values(), key=lambda n: (kept_bytes(n), n.host))
        if busy or not hosts:
            return
        least, most = hosts[0], hosts[-1]
        gap = kept_bytes(most) - kept_bytes(least)
        room = host_room_bytes(least)
        current = current_versions(directory)
        movable = [
            copy
            for held in copies.values()
            for host, copy in held.items()
            if host == most.host and copy.kept and copy.image in current
            if 0 < 2 * copy.nbytes <= gap  # a larger one would only turn the gap around
            if copy.nbytes <= room or least.host in held
            if not self._retries.wait(copy.image, least.id, plan, now)
        ]
        if movable:
            copy = max(movable, key=lambda copy: (copy.nbytes, -copy.last_used_at, copy.image))
            self._moving[copy.image] = copy.host
            self._keep(current[copy.image], least.id, directory, plan)

    def _choose(
        self,
        version: FunctionVersion,
        held: Iterable[Copy],
        directory: Directory,
        weights: Counter[str],
        plan: Plan,
        now: float,
    ) -> None:
        able = []
        for copy in held:
            if any(image == copy.image for image, _ in self._planner.warming):
                return
            if self._retries.wait(copy.image, copy.node, plan, now):
                continue
            able.append(copy)
        if able:
            best = min(able, key=lambda copy: (weights[copy.host], -copy.last_used_at, copy.host))
            weights[best.host] += best.nbytes
            self._keep(version, best.node, directory, plan)

    def _release(
        self, image: str, keepers: list[Copy], directory: Directory, plan: Plan, now: float, wall: float
    ) -> None:
        outdated = is_outdated(directory, image)
        for copy in keepers:
            due = copy.last_used_at + _DEPLOYING_S
            if outdated or due <= wall:
                self._unkeep(copy, plan, now)
            else:
                plan.again_at(now + due - wall)

    # --- relief

    def relieve(self, directory: Directory, plan: Plan, now: float) -> None:
        """Put off starts whose image would push kept copies out, while others can keep those."""
        copies = host_copies(directory.usable_nodes())
        waiting: dict[str, float] = {}
        for action in [a for a in plan.actions if isinstance(a, StartOn)]:
            entry, image = directory.node(action.node), action.version.image
            if image is None or entry is None or entry.record.host in copies.get(image, {}):
                continue
            host = entry.record.host
            moves = self._moves(entry.record, action.version.image_bytes, directory, copies, plan, now)
            since = self._waiting.get(host, now)
            if not moves or now - since >= _RELIEF_S:
                continue
            waiting[host] = since
            plan.actions.remove(action)
            self._planner.put_off(action.instance_id)
            plan.again_at(since + _RELIEF_S)
            for moved, node in moves:
                self._moving[moved.image] = host
                if node and (moved.image, node) not in self._planner.warming:
                    self._keep(current_versions(directory)[moved.image], node, directory, plan)
        self._waiting = waiting

    def _moves(
        self, node: NodeRecord, nbytes: int, directory: Directory, copies: Copies, plan: Plan, now: float
    ) -> list[tuple[Copy, str]]:
        """Kept copies of the node's host and their next keepers ("" for one that has another already),
        enough for `nbytes` to fit; none if it fits as it is, or cannot be made to."""
        lack = nbytes - host_room_bytes(node)
        if lack <= 0 or nbytes > node.host_bytes:
            return []
        current = current_versions(directory)
        mine = [hosts[node.host] for hosts in copies.values() if node.host in hosts]
        moves: list[tuple[Copy, str]] = []
        for copy in sorted((c for c in mine if c.kept), key=lambda c: c.last_used_at):
            if lack > 0 and copy.image in current:
                target = self._next_keeper(copy, directory, copies, plan, now)
                if target is not None:
                    moves.append((copy, target))
                    lack -= copy.nbytes
        return moves if lack <= 0 else []

    def _next_keeper(
        self, copy: Copy, directory: Directory, copies: Copies, plan: Plan, now: float
    ) -> str | None:
        others = [other for host, other in copies[copy.image].items() if host != copy.host]
        if any(other.kept for other in others):
            return ""
        for other in others:
            if not self._retries.wait(copy.image, other.node, plan, now):
                return other.node
        able = [
            node
            for node in directory.usable_nodes()
            if node.host != copy.host
            and host_room_bytes(node) >= copy.nbytes
            and not self._retries.wait(copy.image, node.id, plan, now)
        ]
        return next((node.id for node in choose_warm(copy.image, copy.nbytes, 1, able)), None)

    # --- actions

    def _keep(self, version: FunctionVersion, node: str, directory: Directory, plan: Plan) -> None:
        assert version.image is not None
        entry = directory.node(node)
        assert entry is not None, "keepers are usable nodes"
        sources = choose_sources(version.image, [entry.record], list(directory.usable_nodes()), [])
        self._planner.warming[version.image, node] = None
        plan.actions.append(
            WarmOn(
                version=version,
                node=node,
                holders=sources.holders.get(node, ()),
                keep=True,
                yielding=True,
            )
        )

    def _unkeep(self, copy: Copy, plan: Plan, now: float) -> None:
        until = self._asked.get((copy.image, copy.node), 0.0)
        if now < until:
            plan.again_at(until)
        else:
            self._asked[copy.image, copy.node] = now + _ASK_S
            plan.actions.append(UnkeepOn(image=copy.image, node=copy.node))


def current_versions(directory: Directory) -> dict[str, FunctionVersion]:
    """A current version of each deployed image."""
    versions = (directory.current(name) for name in directory.functions)
    return {version.image: version for version in versions if version is not None and version.image}


def is_outdated(directory: Directory, image: str) -> bool:
    """Whether all versions with this image came before the current one of their function."""
    numbers = [
        version.version < head.current
        for version in directory.versions()
        if version.image == image and (head := directory.functions.get(version.function)) is not None
    ]
    return bool(numbers) and all(numbers)
