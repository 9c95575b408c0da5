"""The base class of all messages of the gateway-invoker channel."""

import msgspec


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """A struct tagged by its class name, so that a union decodes by tag; defaults are not sent."""
