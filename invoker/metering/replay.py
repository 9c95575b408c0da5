"""Rebuilds a meter's unsent ledger records from its journal (pure).

Damaged, truncated or unknown frames lose only their own contents: totals are absolute, so the next frame
corrects them. Each is listed in `faults` with its offset.
"""

import zlib
from dataclasses import dataclass, field
from struct import Struct

import msgspec

from invoker.metering.accounts import LedgerRecord, MeterAccount, MeteredCall, lost_call, start_interval
from invoker.metering.events import (
    AccountClosed,
    AccountOpened,
    CallForgotten,
    CallLost,
    CallUsed,
    Event,
    IntervalCut,
    IntervalDue,
    JournalFrame,
    JournalStarted,
    LostCallDue,
    RecordAcked,
)
from invoker.metering.intervals import intervals_of
from registry.records.usage import InstanceInterval

HEADER = Struct("<II")  # length and CRC-32 of the body

_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(JournalFrame)
_FIRST = _encode(JournalFrame(0, [], []))[:1]  # the first byte of each frame's body


class _LooseFrame(msgspec.Struct, frozen=True, array_like=True):
    """A frame with undecoded events."""

    at: int
    accounts: list[int]
    used: list[int]
    events: list[msgspec.Raw] = []


_loose_decoder = msgspec.msgpack.Decoder(_LooseFrame)
_event_decoder: msgspec.msgpack.Decoder[Event] = msgspec.msgpack.Decoder(Event)


@dataclass(slots=True)
class ReplayedJournal:
    """A meter's state, rebuilt from its journal."""

    node: str = ""
    epoch: int = 0
    origin_s: float = 0.0
    gpu_count: int = 1
    at: int = 0
    accounts: dict[int, MeterAccount] = field(default_factory=dict)
    calls: dict[int, MeteredCall] = field(default_factory=dict)
    unsent: dict[int, LedgerRecord] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)

    def unsent_records(self) -> list[LedgerRecord]:
        """Return the records for the ledger once the meter's process has ended; deterministic."""
        if not self.node:  # the first frame is damaged: times are unknown
            return list(self.unsent.values())
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
        return [*self.unsent.values(), *open_intervals, *lost]

    def apply(self, offset: int, body: bytes) -> None:
        """Apply the frame at `offset`."""
        try:
            frame = _decoder.decode(body)
        except msgspec.MsgspecError as error:
            known = self._decode_known(offset, body, error)
            if known is None:
                return
            frame = known
        self.at = frame.at
        try:
            self._apply_totals(frame)
        except ValueError as error:
            self.faults.append(f"totals at byte {offset}: {error}")
        for event in frame.events:
            try:
                self._apply_event(event)
            except KeyError:
                self.faults.append(f"event at byte {offset} of an unknown account or call: {event!r}")

    def _decode_known(self, offset: int, body: bytes, error: msgspec.MsgspecError) -> JournalFrame | None:
        """Decode the known events of a frame that cannot be decoded completely."""
        try:
            loose = _loose_decoder.decode(body)
        except msgspec.MsgspecError:
            self.faults.append(f"frame at byte {offset}: {error}")
            return None
        events: list[Event] = []
        for raw in loose.events:
            try:
                events.append(_event_decoder.decode(raw))
            except msgspec.MsgspecError as cause:
                self.faults.append(f"event at byte {offset}: {cause}")
        return JournalFrame(loose.at, loose.accounts, loose.used, events)

    def _apply_totals(self, frame: JournalFrame) -> None:
        """Apply totals. Raises ValueError if their number is wrong."""
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

    def _apply_event(self, event: Event) -> None:
        match event:
            case JournalStarted():
                self.node, self.epoch, self.origin_s = event.node, event.epoch, event.origin_s
                self.gpu_count = event.gpu_count
            case AccountOpened():
                self.accounts[event.account] = _account(event)
            case IntervalCut():
                account = self.accounts[event.account]
                account.state, account.from_at, account.base = event.state, event.from_at, event.base
                account.raise_to(event.base)  # totals of a lost frame
                start_interval(account, event.left)
            case AccountClosed():
                self.accounts[event.account].present = False
            case CallUsed():
                account = self.accounts[event.account]
                call = self.calls[event.call] = MeteredCall(
                    event.call,
                    event.call_id,
                    account,
                    used_us=event.used_us,
                    declared=True,
                    lost=event.lost,
                    reported_us=event.reported_us,
                )
                if call.used_us > call.reported_us:
                    account.using[call.number] = call
            case CallLost():
                self.calls[event.call].lost = True
            case CallForgotten():
                call = self.calls.pop(event.call)
                call.account.settled_us += call.used_us
                call.account.using.pop(call.number, None)
                if call.account.present and call.used_us:
                    call.account.parts.append(call.part(over=True))
            case IntervalDue() | LostCallDue():
                self.unsent[event.due] = event.record
            case RecordAcked():
                self.unsent.pop(event.due, None)

    def _intervals(self, account: MeterAccount, ended_at: float) -> list[InstanceInterval]:
        if self.faults:
            account.count_unattributed_as_idle()
        known = (self.node, self.epoch, account)
        return intervals_of(*known, to_at=ended_at, final=True, gpu_count=self.gpu_count)[0]


def encode_frame(frame: JournalFrame) -> bytes:
    """Encode a frame with its header."""
    body = _encode(frame)
    return HEADER.pack(len(body), zlib.crc32(body)) + body


def replay(data: bytes) -> ReplayedJournal:
    """Rebuild the state at the last complete frame."""
    state, at = ReplayedJournal(), 0
    while at < len(data):
        body = _body(data, at)
        if body is None:
            end = _next_frame(data, at + 1)
            fault = "damaged" if end < len(data) else "damaged or cut off, up to the end"
            state.faults.append(f"bytes [{at}, {end}) are {fault}")
            at = end
        else:
            state.apply(at, body)
            at += HEADER.size + len(body)
    return state


def _body(data: bytes, start: int) -> bytes | None:
    """Return the body of the frame at `start`, None if there is no valid one."""
    if start + HEADER.size > len(data):
        return None
    length, checksum = HEADER.unpack_from(data, start)
    start += HEADER.size
    if start + length > len(data):  # most bytes that are not a header fail here, without a copy
        return None
    body = data[start : start + length]
    return body if body[:1] == _FIRST and zlib.crc32(body) == checksum else None


def _next_frame(data: bytes, start: int) -> int:
    """Return the offset of the first valid frame from `start` on, or the data's length."""
    at = data.find(_FIRST, start + HEADER.size)
    while at >= 0:
        if _body(data, at - HEADER.size) is not None:
            return at - HEADER.size
        at = data.find(_FIRST, at + 1)
    return len(data)


def _account(event: AccountOpened) -> MeterAccount:
    busy, loading, idle = event.totals
    return MeterAccount(
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
