"""The trace that a request belongs to, as messages and links between nodes carry it."""

from typing import Annotated

import msgspec


class TraceContext(msgspec.Struct, frozen=True, array_like=True):
    """The values of the headers `traceparent` and `tracestate` (W3C Trace Context, level 1).

    What gets it continues the trace; a node of an earlier release ignores it.
    """

    parent: Annotated[str, msgspec.Meta(max_length=64)]
    state: Annotated[str, msgspec.Meta(max_length=512)] = ""
