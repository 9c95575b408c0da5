"""Exceptions of the registry.

RegistryError
├── InvalidRecord        a value that breaks a record's rules (the message names the field)
├── NotFound             no such function, version, key, blob or node
├── Conflict             the record was changed concurrently, or exists already
├── StaleEpoch           a writer of which the lease has passed to another
├── StateUnavailable     Redis does not answer, or refuses; StateFull where it has no memory left for a write,
│                        NewerSchema where its records are those of a later release
├── KeyRefused           an API key that is malformed, unknown, revoked or expired
├── ChannelError         the gateway-invoker channel
│   ├── ChannelClosed    the peer is lost; calls in progress end with this
│   └── RemoteError      the peer answered with an error (code, message)
└── ImageError           model images
    ├── CheckpointError  a checkpoint that cannot be packed (the message names the file and the reason)
    ├── CorruptImage     bytes that do not match their checksum (names the units)
    └── StoreError       the store cannot be read or written; StoreFull where it has no room
"""


class RegistryError(Exception):
    """Any failure of the registry."""


class InvalidRecord(RegistryError, ValueError):
    """A value breaks a record's rules."""


class NotFound(RegistryError, LookupError):
    """There is no such function, version, key, blob or node."""


class Conflict(RegistryError):
    """The record exists already or was changed concurrently."""


class StaleEpoch(RegistryError):
    """The writer's lease has passed to another holder."""


class StateUnavailable(RegistryError):
    """Redis does not answer."""


class StateFull(StateUnavailable):
    """Redis has reached its `maxmemory`: it refuses what would grow, reads go on."""


class NewerSchema(StateUnavailable):
    """The cluster's records are those of a later release, which this one would misread."""


class KeyRefused(RegistryError):
    """An API key is malformed, unknown, revoked or expired."""


class ChannelError(RegistryError):
    """The gateway-invoker channel failed."""


class ChannelClosed(ChannelError):
    """The peer is lost."""


class RemoteError(ChannelError):
    """The peer answered a call with an error."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message


def reason_of(error: Exception) -> str:
    """Return the message of an error, of a RemoteError without its code."""
    return error.message if isinstance(error, RemoteError) else str(error)


class ImageError(RegistryError):
    """A model image cannot be made, read or trusted."""


class CheckpointError(ImageError):
    """The checkpoint cannot be packed."""


class CorruptImage(ImageError):
    """Bytes of an image do not match its manifest."""


class StoreError(ImageError):
    """The blob store cannot be read or written."""


class StoreFull(StoreError):
    """The blob store has no room for what was to be written."""
