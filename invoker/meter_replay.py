"""What a journal says: the records that its meter owed the ledger at the last whole frame. Pure."""

import zlib
from collections.abc import Iterator
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
_MAX_FRAME = 256 << 20

_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(Frame)


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

    def remains(self) -> list[Record]:
        """What the ledger is to be told, once it is known that the meter is gone: the same each time."""
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

    def apply(self, frame: Frame) -> None:
        """Take a frame in."""
        self.at = frame.at
        rows = frame.accounts
        for index in range(0, len(rows), 4):
            account = self.accounts.get(rows[index])
            if account is not None:
                account.busy, account.loading, account.idle = rows[index + 1 : index + 4]
        for number, used_us in zip(frame.used[::2], frame.used[1::2], strict=True):
            call = self.calls.get(number)
            if call is not None:
                call.used_us = used_us
                call.account.using[number] = call
        for event in frame.events:
            self._happened(event)

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
        return intervals_of(self.node, epoch, account, to_at=ended_at, final=True)[0]


def encode_frame(frame: Frame) -> bytes:
    """A frame as it stands in a journal."""
    body = _encode(frame)
    return HEADER.pack(len(body), zlib.crc32(body)) + body


def frames(data: bytes) -> Iterator[Frame]:
    """The whole frames of a journal, up to its end or to the first that is cut off or damaged."""
    start = 0
    while start + HEADER.size <= len(data):
        length, checksum = HEADER.unpack_from(data, start)
        start += HEADER.size
        body = data[start : start + length]
        if length > _MAX_FRAME or len(body) < length or zlib.crc32(body) != checksum:
            return
        start += length
        yield _decoder.decode(body)


def replay(data: bytes) -> Replayed:
    """The state at the last whole frame."""
    state = Replayed()
    for frame in frames(data):
        state.apply(frame)
    return state


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
