"""Exceptions of handlers, whose messages reach callers of any tenant: no lines of the log, no tracebacks.

`code` is a channel error code (see registry/messages/node.py).

HandlerError
├── BadHandler         its code cannot be loaded (start_failed)
├── HandlerRaised      the handler raised, or its result is not JSON
├── HandlerCrashed     its process ended, exceeded a limit or broke the protocol
├── HandlerTimeout     the call exceeded its time limit
├── OutputTooLarge     the call's output exceeds its limit
└── HandlerStopped     the call came after aclose, or was in progress during it
"""


class HandlerError(Exception):
    """A failure of a handler."""

    code = "handler_error"


class BadHandler(HandlerError):
    """The handler's code cannot be loaded."""

    code = "start_failed"


class HandlerRaised(HandlerError):
    """The handler raised, or its result is not JSON."""


class HandlerCrashed(HandlerError):
    """The handler's process ended or broke the protocol."""


class HandlerTimeout(HandlerError):
    """The call exceeded its time limit."""


class OutputTooLarge(HandlerError):
    """The call's output exceeds its limit."""


class HandlerStopped(HandlerError):
    """The handler has been stopped."""

    code = "draining"
