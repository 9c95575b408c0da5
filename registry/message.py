"""What all messages of the gateway-invoker channel are."""

import msgspec


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Tagged by its class name, so that a union of messages decodes by tag; defaults are not sent."""
