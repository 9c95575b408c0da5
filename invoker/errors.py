"""Exceptions of the invoker. `code` is the channel error code that a gateway sees (registry/messages.py).

InvokerError
├── SettingsError       a flag or the environment is wrong
├── NoSuchInstance      no_such_instance: it is not here, or no longer
├── NoSuchPipeline      no_such_pipeline: it is not run here, or no longer
├── PipelineLost        pipeline_lost: a stage is gone, and the pipeline with it
├── BadWork             bad_request: the work does not fit the instance
├── Draining            draining: the node (or instance) takes nothing new
├── StartFailed         start_failed: an instance could not be made ready
│   └── StartStopped    it was told to stop meanwhile
├── HandlerNotAllowed   handler_not_allowed: the operator has not allowed handlers
├── HandlerError        handler_error: the user's own code failed
├── OutOfDeviceMemory   out_of_memory: the arena has no room (the message has the numbers)
└── HostTierError       start_failed: the shared host tier cannot be used
    └── HostTierFull    out_of_memory: nothing idle is left to evict
"""


class InvokerError(Exception):
    """Any failure of the invoker."""

    code = "internal"


class SettingsError(InvokerError):
    """A flag or an environment variable is wrong."""


class NoSuchInstance(InvokerError):
    """The instance is not on this node."""

    code = "no_such_instance"


class NoSuchPipeline(InvokerError):
    """The node does not run this pipeline, or this stage."""

    code = "no_such_pipeline"


class PipelineLost(InvokerError):
    """A stage is gone. The calls go on elsewhere from their tokens so far."""

    code = "pipeline_lost"


class BadWork(InvokerError):
    """The work does not fit the instance it was sent to."""

    code = "bad_request"


class Draining(InvokerError):
    """The node or the instance takes nothing new."""

    code = "draining"


class StartFailed(InvokerError):
    """An instance could not be made ready."""

    code = "start_failed"


class StartStopped(StartFailed):
    """The instance was told to stop before it was ready."""


class HandlerNotAllowed(InvokerError):
    """Custom handlers are off on this node."""

    code = "handler_not_allowed"


class HandlerError(InvokerError):
    """The user's own handler failed."""

    code = "handler_error"


class OutOfDeviceMemory(InvokerError):
    """The arena has no room for what was asked."""

    code = "out_of_memory"


class HostTierError(InvokerError):
    """The shared host tier cannot be used."""

    code = "start_failed"


class HostTierFull(HostTierError):
    """The host tier has no room, and nothing idle to evict."""

    code = "out_of_memory"
