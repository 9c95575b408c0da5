"""What a journal says: the records that its meter owed the ledger at the last whole frame. Pure.

What is damaged, cut off or not understood costs only itself: totals are absolute, so that the next frame
makes up for those of one before. What it was is told in `faults`, with its place.
"""

import zlib
from dataclasses import dataclass, field
from struct import Struct

import msgspec

from invoker.meter_accounts import Account, MeteredCall, Record, lost_call, tell_parts
from invoker.meter_events import (
    Began,
    Called,
    Cut,
    Entered,
    Event,
    Forgotten,
    Frame,
    IntervalDue,
    Left,
    Lost,
    LostCallDue,
    Paid,
)
from invoker.meter_intervals import intervals_of
from registry.usage import InstanceInterval

HEADER = Struct("<II")  # length and CRC-32 of the body

_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(Frame)
_FIRST = _encode(Frame(0, [], []))[:1]  # of each frame's body


class _Loose(msgspec.Struct, frozen=True, array_like=True):
    """A frame some of whose events are not known here."""

    at: int
    accounts: list[int]
    used: list[int]
    events: list[msgspec.Raw] = []


_loose_decoder = msgspec.msgpack.Decoder(_Loose)
_event_decoder: msgspec.msgpack.Decoder[Event] = msgspec.msgpack.Decoder(Event)


@dataclass(slots=True)
class Replayed:
    """A meter's state as its journal tells it."""

    node: str = ""
    epoch: int = 0
    origin_s: float = 0.0
    itemised: bool = False
    at: int = 0
    accounts: dict[int, Account] = field(default_factory=dict)
    calls: dict[int, MeteredCall] = field(default_factory=dict)
    dues: dict[int, Record] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)

    def remains(self) -> list[Record]:
        """What the ledger is to be told, once it is known that the meter is gone: the same each time."""
        if not self.node:  # its beginning is damaged: nobody knows when anything was
            return list(self.dues.values())
        ended_at = self.origin_s + self.at / 1e6
        open_intervals = [
            interval
            for account in self.accounts.values()
            if account.present
            for interval in self._intervals(account, ended_at)
        ]
        lost = [
            lost_call(self.node, self.epoch, call, ended_at)
            for call in self.calls.values()
            if call.used_us and not call.lost
        ]
        return [*self.dues.values(), *open_intervals, *lost]

    def take(self, place: int, body: bytes) -> None:
        """Take in the frame that stands there."""
        try:
            frame = _decoder.decode(body)
        except msgspec.MsgspecError as error:
            known = self._known(place, body, error)
            if known is None:
                return
            frame = known
        self.at = frame.at
        try:
            self._count(frame)
        except ValueError as error:
            self.faults.append(f"totals at byte {place}: {error}")
        for event in frame.events:
            try:
                self._happened(event)
            except KeyError:
                self.faults.append(f"event at byte {place} of something unknown: {event!r}")

    def _known(self, place: int, body: bytes, error: msgspec.MsgspecError) -> Frame | None:
        """What can be understood of a frame that cannot be understood whole."""
        try:
            loose = _loose_decoder.decode(body)
        except msgspec.MsgspecError:
            self.faults.append(f"frame at byte {place}: {error}")
            return None
        events: list[Event] = []
        for raw in loose.events:
            try:
                events.append(_event_decoder.decode(raw))
            except msgspec.MsgspecError as cause:
                self.faults.append(f"event at byte {place}: {cause}")
        return Frame(loose.at, loose.accounts, loose.used, events)

    def _count(self, frame: Frame) -> None:
        """Take totals in. Raises ValueError where they are not as many as there should be."""
        rows = frame.accounts
        for index in range(0, len(rows), 4):
            busy, loading, idle = rows[index + 1 : index + 4]
            account = self.accounts.get(rows[index])
            if account is not None:
                account.busy, account.loading, account.idle = busy, loading, idle
        for number, used_us in zip(frame.used[::2], frame.used[1::2], strict=True):
            call = self.calls.get(number)
            if call is not None:
                call.used_us = used_us
                call.account.using[number] = call

    def _happened(self, event: Event) -> None:
        match event:
            case Began():
                self.node, self.epoch, self.origin_s = event.node, event.epoch, event.origin_s
                self.itemised = event.itemised
            case Entered():
                self.accounts[event.account] = _account(event)
            case Cut():
                account = self.accounts[event.account]
                account.state, account.from_at, account.base = event.state, event.from_at, event.base
                account.reach(event.base)  # totals of a frame that is missing
                tell_parts(account, event.left)
            case Left():
                self.accounts[event.account].present = False
            case Called():
                account = self.accounts[event.account]
                call = self.calls[event.call] = MeteredCall(
                    event.call,
                    event.call_id,
                    account,
                    used_us=event.used_us,
                    declared=True,
                    lost=event.lost,
                    told_us=event.told_us,
                )
                if call.used_us > call.told_us:
                    account.using[call.number] = call
            case Lost():
                self.calls[event.call].lost = True
            case Forgotten():
                call = self.calls.pop(event.call)
                call.account.settled_us += call.used_us
                call.account.using.pop(call.number, None)
                if call.account.present and call.used_us:
                    call.account.parts.append(call.part(over=True))
            case IntervalDue() | LostCallDue():
                self.dues[event.due] = event.record
            case Paid():
                self.dues.pop(event.due, None)

    def _intervals(self, account: Account, ended_at: float) -> list[InstanceInterval]:
        epoch = self.epoch if self.itemised else 0
        if self.faults and epoch:
            account.disown()
        return intervals_of(self.node, epoch, account, to_at=ended_at, final=True)[0]


def encode_frame(frame: Frame) -> bytes:
    """A frame as it stands in a journal."""
    body = _encode(frame)
    return HEADER.pack(len(body), zlib.crc32(body)) + body


def replay(data: bytes) -> Replayed:
    """The state at the last whole frame."""
    state, at = Replayed(), 0
    while at < len(data):
        body = _body(data, at)
        if body is None:
            end = _next_frame(data, at + 1)
            what = "damaged" if end < len(data) else "damaged or cut off, up to the end"
            state.faults.append(f"bytes [{at}, {end}) are {what}")
            at = end
        else:
            state.take(at, body)
            at += HEADER.size + len(body)
    return state


def _body(data: bytes, start: int) -> bytes | None:
    """The body of the whole frame that begins there, if one does."""
    if start + HEADER.size > len(data):
        return None
    length, checksum = HEADER.unpack_from(data, start)
    start += HEADER.size
    if start + length > len(data):  # as most of what is no header says: not copied to be told so
        return None
    body = data[start : start + length]
    return body if body[:1] == _FIRST and zlib.crc32(body) == checksum else None


def _next_frame(data: bytes, start: int) -> int:
    """Where the first whole frame from there on begins; the end of the data if there is none."""
    at = data.find(_FIRST, start + HEADER.size)
    while at >= 0:
        if _body(data, at - HEADER.size) is not None:
            return at - HEADER.size
        at = data.find(_FIRST, at + 1)
    return len(data)


def _account(event: Entered) -> Account:
    busy, loading, idle = event.totals
    return Account(
        event.account,
        event.instance_id,
        event.function,
        event.version,
        event.state,
        False,
        0,
        event.from_at,
        event.present,
        busy,
        loading,
        idle,
        event.base,
        event.settled_us,
        parts=list(event.parts),
    )
