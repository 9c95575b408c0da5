"""Exceptions of handlers. `code` is a channel error code (see registry/messages.py).

HandlerError
├── BadHandler         its code cannot be loaded (start_failed)
├── HandlerRaised      the handler raised, or returned what is not JSON
├── HandlerCrashed     its process died or broke the protocol; the message has the last log lines
├── HandlerTimeout     the call ran out of time
├── OutputTooLarge     the call returned more than its limit
└── HandlerStopped     the call came after, or was under way during, aclose
"""


class HandlerError(Exception):
    """Any failure of a handler."""

    code = "handler_error"


class BadHandler(HandlerError):
    """The handler's code cannot be loaded."""

    code = "start_failed"


class HandlerRaised(HandlerError):
    """The handler raised, or returned what is not JSON."""


class HandlerCrashed(HandlerError):
    """The handler's process died or broke the protocol."""


class HandlerTimeout(HandlerError):
    """The call ran out of time."""


class OutputTooLarge(HandlerError):
    """The call returned more than its limit."""


class HandlerStopped(HandlerError):
    """The handler has been stopped."""

    code = "draining"
