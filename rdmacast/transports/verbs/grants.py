"""What a peer may read: exactly a range, by its own queue pair, while the grant lasts."""

from collections.abc import Iterator
from contextlib import contextmanager

from rdmacast.errors import DeviceError
from rdmacast.transports.verbs.address import RemoteMemory
from rdmacast.transports.verbs.device import ReadGrant, ServingPair
from rdmacast.transports.verbs.memory import RegisteredMemory, address_of, owner_of


@contextmanager
def granted(memory: RegisteredMemory, pair: ServingPair, view: memoryview) -> Iterator[RemoteMemory]:
    """Let the pair's peer read the view inside. Raises DeviceError."""
    start = address_of(view)
    if not pair.binds or _is_read_only(view):
        grant = pair.register(start, view.nbytes, is_gpu=False)
        with _lasting(memory, pair, grant, view):
            yield grant.memory
        return
    with memory.registered(view) as registration:
        grant = pair.bind(registration, start, view.nbytes)
        with _lasting(memory, pair, grant, view):
            yield grant.memory


@contextmanager
def granted_gpu(
    memory: RegisteredMemory, pair: ServingPair, address: int, nbytes: int
) -> Iterator[RemoteMemory]:
    """Let the pair's peer read a range of a registered GPU's memory inside. Raises DeviceError."""
    arena = memory.arena_at(address, nbytes)
    if arena is None:
        raise DeviceError("that memory of a GPU is not registered")
    grant = pair.bind(arena, address, nbytes) if pair.binds else pair.register(address, nbytes, is_gpu=True)
    with _lasting(memory, pair, grant, None):
        yield grant.memory


@contextmanager
def _lasting(
    memory: RegisteredMemory, pair: ServingPair, grant: ReadGrant, view: memoryview | None
) -> Iterator[None]:
    """Revoke the grant at the end; a device that refuses loses the queue pair, or else the memory."""
    try:
        yield
    finally:
        try:
            grant.close()
        except DeviceError:
            try:
                pair.close()
            except DeviceError as error:
                memory.quarantine.add(grant, view, error)


def _is_read_only(view: memoryview) -> bool:
    """Return whether the memory itself, of which the view may be a read-only one, cannot be written.

    The kernel takes such pages for reading only, not for windows, which could permit writes.
    """
    with memoryview(owner_of(view)) as whole:  # type: ignore[arg-type]
        return whole.readonly
