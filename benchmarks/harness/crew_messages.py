"""The protocol between a benchmark and its child processes: typed messages, one JSON line each.

A child connects to the benchmark's Unix socket and sends MemberHello. It then answers each order by one
reply, or by OrderFailed, after which it ends. It also ends when the benchmark closes the connection.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec


class CrewMessage(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A message, tagged with its class name."""


class MemberHello(CrewMessage, frozen=True, kw_only=True):
    """A process is ready for orders; `url` and `host` are where it serves, if it does."""

    rank: int
    pid: int = msgspec.field(default_factory=os.getpid)
    url: str = ""
    host: str = ""


class OrderFailed(CrewMessage, frozen=True, kw_only=True):
    """An order failed; the process ends."""

    reason: str


encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class CrewProtocol:
    """The orders and replies of one kind of child."""

    decode_order: Callable[[bytes], Any]
    decode_reply: Callable[[bytes], Any]

    @classmethod
    def of(cls, orders: Any, replies: Any) -> "CrewProtocol":
        """Build the protocol from two unions of CrewMessage classes."""
        replies = replies | MemberHello | OrderFailed
        return cls(msgspec.json.Decoder(orders).decode, msgspec.json.Decoder(replies).decode)


NO_ORDERS = CrewProtocol.of(MemberHello, MemberHello)  # of a child that only serves until its crew ends
