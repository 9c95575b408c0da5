"""The entries that watchers are shown, and what of them has changed. Pure.

An entry is encoded once, when it changes, however many watchers there are. What it is made of is compared by
identity first: the records of a view are immutable, and replaced when they change.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import msgspec

from gateway.watch.casts import (
    MAX_CASTS,
    ShownCast,
    nodes_to_follow,
    show_blocks,
    show_cast,
    show_layers,
)
from gateway.watch.scope import WatchScope
from gateway.watch.shown import show_function, show_instance, show_live, show_node
from gateway.watch.traffic import ShownTraffic
from registry.messages.arrivals import Arrivals
from registry.records.cast import CastRecord, CastState
from registry.records.change import Snapshot
from registry.records.function import Function

_encode = msgspec.json.Encoder().encode


class EntryKind(StrEnum):
    """The kinds of entries, as they are named in a frame."""

    NODE = "nodes"
    FUNCTION = "functions"
    INSTANCE = "instances"
    LIVE = "live"
    CAST = "casts"
    BLOCKS = "blocks"
    LAYERS = "layers"
    TRAFFIC = "traffic"


@dataclass(frozen=True, slots=True)
class BoardEntry:
    """An entry: JSON `data`, made from `source`, about a function ("": about the cluster)."""

    function: str
    source: object
    data: bytes


@dataclass(slots=True)
class BoardChange:
    """What one update has changed: entries by kind and id, ids that are gone, and who sees what."""

    put: dict[EntryKind, dict[str, BoardEntry]] = field(default_factory=dict)
    gone: dict[EntryKind, dict[str, str]] = field(default_factory=dict)  # id to its function
    access: bool = False

    def __bool__(self) -> bool:
        return bool(self.put or self.gone or self.access)


@dataclass(frozen=True, slots=True, kw_only=True)
class BoardInput:
    """What an update is made from: the view, what arrives on nodes, parts of casts that ended, traffic."""

    view: Snapshot
    arrivals: Mapping[str, Arrivals]
    ended: Callable[[str], Mapping[str, CastState]]
    traffic: Iterable[ShownTraffic]


class WatchBoard:
    """All entries; `update` replaces them and returns what has changed."""

    def __init__(self) -> None:
        self._entries: dict[EntryKind, dict[str, BoardEntry]] = {kind: {} for kind in EntryKind}
        self._functions: tuple[Function, ...] = ()
        self._settled: dict[str, tuple[CastRecord, ShownCast]] = {}  # casts that have ended
        self._names: dict[WatchScope, frozenset[str]] = {}
        self.follow: list[str] = []  # nodes on which something arrives

    def __repr__(self) -> str:
        counts = {kind.value: len(entries) for kind, entries in self._entries.items() if entries}
        return f"<WatchBoard {counts}>"

    def update(self, given: BoardInput) -> BoardChange:
        """Set the entries to what they are now."""
        view, change = given.view, BoardChange()
        self._note_access(view.functions, change)
        versions = {(one.function, one.version): one for one in view.versions}
        functions = [
            (one, versions[one.name, one.current])
            for one in view.functions
            if (one.name, one.current) in versions
        ]
        records = {up.record.id: up.record for up in view.nodes}
        casts = self._casts(view.casts, given)
        of_instance = {one.instance_id: one.function for one in view.instances}
        self.follow = nodes_to_follow(
            (cast for _, _, cast in casts), ((one.node, one.state) for one in view.instances)
        )
        put = self._put
        put(change, EntryKind.NODE, ((id_, "", record) for id_, record in records.items()), show_node)
        put(change, EntryKind.FUNCTION, ((one[0].name, one[0].name, one) for one in functions), show_function)
        put(
            change,
            EntryKind.INSTANCE,
            ((one.instance_id, one.function, one) for one in view.instances),
            show_instance,
        )
        live = (up.record for up in view.live)
        put(
            change,
            EntryKind.LIVE,
            ((f"{one.function}:{one.version}", one.function, one) for one in live),
            show_live,
        )
        put(change, EntryKind.CAST, ((id_, cast.function, cast) for id_, _, cast in casts))
        put(change, EntryKind.BLOCKS, show_blocks(casts, given.arrivals))
        put(change, EntryKind.LAYERS, show_layers(of_instance, given.arrivals.values()))
        put(
            change,
            EntryKind.TRAFFIC,
            ((f"{one.function}:{one.version}", one.function, one) for one in given.traffic),
        )
        return change

    def names(self, scope: WatchScope) -> frozenset[str]:
        """Return the functions that a scope sees."""
        known = self._names.get(scope)
        if known is None:
            known = self._names[scope] = scope.names(self._functions)
        return known

    def whole(self, scope: WatchScope, at: float) -> bytes:
        """Return a frame with all that the scope sees: it replaces what was shown before."""
        return self._frame(scope, at, self._entries, {}, full=True) or b""

    def frame(self, change: BoardChange, scope: WatchScope, at: float) -> bytes | None:
        """Return a frame with what has changed for a scope, None if nothing has."""
        if change.access and not scope.everything:
            return self.whole(scope, at)
        return self._frame(scope, at, change.put, change.gone, full=False)

    def _frame(
        self,
        scope: WatchScope,
        at: float,
        put: Mapping[EntryKind, Mapping[str, BoardEntry]],
        gone: Mapping[EntryKind, Mapping[str, str]],
        *,
        full: bool,
    ) -> bytes | None:
        names = None if scope.everything else self.names(scope)
        set_ = [
            b'"%b":{%b}' % (kind.value.encode(), b",".join(parts))
            for kind, entries in put.items()
            if (
                parts := [
                    _encode(id_) + b":" + entry.data
                    for id_, entry in entries.items()
                    if names is None or entry.function in names
                ]
            )
        ]
        left = {
            kind.value: ids
            for kind, functions in gone.items()
            if (ids := [id_ for id_, function in functions.items() if names is None or function in names])
        }
        if not (set_ or left or full):
            return None
        return b'{"full":%b,"at":%.3f,"set":{%b},"gone":%b}' % (
            b"true" if full else b"false",
            at,
            b",".join(set_),
            _encode(left),
        )

    def _note_access(self, functions: tuple[Function, ...], change: BoardChange) -> None:
        before = {one.name: one.access for one in self._functions}
        now = {one.name: one.access for one in functions}
        if before != now:
            # What a scope does not see any more, it would not be sent as gone either.
            change.access = any(now.get(name) != access for name, access in before.items())
            self._names.clear()
        self._functions = functions

    def _casts(self, records: Iterable[CastRecord], given: BoardInput) -> list[tuple[str, str, ShownCast]]:
        """Return (id, image, cast) of the latest casts; one that has ended is made once."""
        nodes = {up.record.id: up.record for up in given.view.nodes}
        settled, found = dict[str, tuple[CastRecord, ShownCast]](), list[tuple[str, str, ShownCast]]()
        for record in sorted(records, key=lambda one: one.started_at, reverse=True)[:MAX_CASTS]:
            known = self._settled.get(record.cast_id)
            if known is not None and known[0] is record:
                cast = known[1]
            else:
                cast = show_cast(record, given.ended(record.cast_id), nodes)
            if not cast.running:
                settled[record.cast_id] = record, cast
            found.append((record.cast_id, record.image, cast))
        self._settled = settled
        return found

    def _put(
        self,
        change: BoardChange,
        kind: EntryKind,
        items: Iterable[tuple[str, str, Any]],
        show: Callable[[Any], msgspec.Struct] | None = None,
    ) -> None:
        before, now = self._entries[kind], dict[str, BoardEntry]()
        changed: dict[str, BoardEntry] = {}
        for id_, function, source in items:
            known = before.get(id_)
            if known is not None and (known.source is source or known.source == source):
                now[id_] = known
                continue
            data = _encode(source if show is None else show(source))
            entry = now[id_] = BoardEntry(function, source, data)
            if known is None or known.data != data:
                changed[id_] = entry
        if changed:
            change.put[kind] = changed
        if len(now) != len(before) or before.keys() != now.keys():
            gone = {id_: entry.function for id_, entry in before.items() if id_ not in now}
            if gone:
                change.gone[kind] = gone
        self._entries[kind] = now
