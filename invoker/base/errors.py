"""Exceptions of the invoker; `code` is the error code sent to gateways (`registry.messages`).

InvokerError
├── SettingsError       a flag or the environment is wrong
├── NoSuchInstance      no_such_instance: not on this node, or ended
├── NoSuchPipeline      no_such_pipeline: not on this node, or ended
├── PipelineLost        pipeline_lost: a stage was lost, and with it the pipeline
├── InvalidWork         bad_request: the request does not fit the instance
├── NodeDraining        draining: the node (or instance) refuses new requests
├── StartFailed         start_failed: an instance did not become ready
│   └── StartStopped    it was stopped before it was ready
├── HandlerNotAllowed   handler_not_allowed: handlers are not enabled on this node
├── OutOfDeviceMemory   out_of_memory: the arena has no room (the message gives the sizes)
├── OutOfPinnedMemory   start_failed: more is to be lent at once than there is
└── HostTierError       start_failed: the host tier cannot be used
    └── HostTierFull    out_of_memory: no idle image is left to evict
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
    """The pipeline or stage is not on this node."""

    code = "no_such_pipeline"


class PipelineLost(InvokerError):
    """A stage was lost; requests continue elsewhere from their tokens so far."""

    code = "pipeline_lost"


class InvalidWork(InvokerError):
    """The request does not fit the instance that it was sent to."""

    code = "bad_request"


class NodeDraining(InvokerError):
    """The node or the instance refuses new requests."""

    code = "draining"


class StartFailed(InvokerError):
    """An instance did not become ready."""

    code = "start_failed"


class StartStopped(StartFailed):
    """The instance was stopped before it was ready."""


class HandlerNotAllowed(InvokerError):
    """Handlers are not enabled on this node."""

    code = "handler_not_allowed"


class OutOfDeviceMemory(InvokerError):
    """The arena has no room for a region."""

    code = "out_of_memory"


class OutOfPinnedMemory(InvokerError):
    """The node's page-locked host memory is too small for what is to be lent at once."""

    code = "start_failed"


class HostTierError(InvokerError):
    """The host tier cannot be used."""

    code = "start_failed"


class HostTierFull(HostTierError):
    """The host tier has no room and no idle image to evict."""

    code = "out_of_memory"
