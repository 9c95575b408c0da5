"""Registered memory by address: each piece is registered once, until its owner is collected.

A registration lets this process's own READs land there; what peers may read is granted in `grants`.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from rdmacast.errors import DeviceError
from rdmacast.locked_memory import why_not_locked
from rdmacast.transports.verbs.device import LocalMemory, Registrar, Registration
from rdmacast.transports.verbs.quarantine import Quarantine

# Registering takes the pages, and holds the event loop meanwhile: not a whole image that is still arriving.
PIECE_BYTES = 64 << 20

_Key = tuple[int, int, int]  # owner, first and last piece


class _Owned:
    """The registration of some pieces of an object's memory. With `owner` it lives as long as that object."""

    def __init__(self, registration: Registration, owner: "weakref.ref[object] | None") -> None:
        self.registration = registration
        self.owner = owner
        self.users = 0

    def is_of(self, address: int, nbytes: int) -> bool:
        return (self.registration.address, self.registration.nbytes) == (address, nbytes)


class RegisteredMemory:
    """The registrations of a device, by the address of any view.

    What was added by `add` or `add_gpu` is found first. Other memory is registered at its first use: the
    pieces of the mapping or array that the view lies in, once, until it is closed and collected; memory
    whose owner has no weak references (`bytes`, `bytearray`) only during the use.
    """

    def __init__(self, device: Registrar) -> None:
        self._device = device
        self._arenas: list[Registration] = []
        self._owned: dict[_Key, _Owned] = {}
        self.quarantine = Quarantine()

    def __repr__(self) -> str:
        return f"RegisteredMemory({len(self._arenas)} arenas, {len(self._owned)} others)"

    @property
    def registrations(self) -> int:
        return len(self._arenas) + len(self._owned)

    @contextmanager
    def add(self, buffer: memoryview) -> Iterator[None]:
        """Register an arena inside. Raises DeviceError."""
        address = address_of(buffer)
        with self._added(self._register(address, buffer.nbytes, writable=not buffer.readonly)):
            yield

    @contextmanager
    def add_gpu(self, address: int, nbytes: int) -> Iterator[None]:
        """Register an arena of a GPU inside; views of it are found by address only."""
        with self._added(self._device.register_gpu(address, nbytes)):
            yield

    @contextmanager
    def local(self, view: memoryview) -> Iterator[LocalMemory]:
        """Register the view inside, for reads into it. Raises DeviceError."""
        with self.registered(view) as registration:
            start = address_of(view)
            yield LocalMemory(registration.iova + start - registration.address, registration.lkey)

    @contextmanager
    def registered(self, view: memoryview) -> Iterator[Registration]:
        """Hold a registration that covers the view. Raises DeviceError."""
        start = address_of(view)
        arena = self.arena_at(start, view.nbytes)
        if arena is not None:
            yield arena
            return
        key, owned = self._owned_by(view, start)
        owned.users += 1
        try:
            yield owned.registration
        finally:
            owned.users -= 1
            if not owned.users and (owned.owner is None or self._owned.get(key) is not owned):
                self._forget(key, owned)

    def arena_at(self, address: int, nbytes: int) -> Registration | None:
        """Return the added arena which covers the range, also memory that only its address identifies."""
        return next((arena for arena in self._arenas if _covers(arena, address, nbytes)), None)

    def withdraw(self, local: LocalMemory, view: memoryview) -> None:
        """Deregister memory into which a READ of a queue pair that could not be closed may still land.

        If that fails, too, the memory is quarantined. What else is read into it fails, and is read again.
        """
        for arena in [arena for arena in self._arenas if arena.lkey == local.lkey]:
            self._arenas.remove(arena)
            self.quarantine.close(arena, view)
        for key, owned in tuple(self._owned.items()):
            if owned.registration.lkey == local.lkey:
                del self._owned[key]
                self.quarantine.close(owned.registration, view)

    def close(self) -> None:
        """Close all registrations, of which none may be in use."""
        registrations = self._all()
        self._arenas, self._owned = [], {}
        for registration in registrations:
            self.quarantine.close(registration)

    @contextmanager
    def _added(self, registration: Registration) -> Iterator[None]:
        self._arenas.append(registration)
        try:
            yield
        finally:
            if registration in self._arenas:
                self._arenas.remove(registration)
            self.quarantine.close(registration)

    def _register(self, address: int, nbytes: int, *, writable: bool) -> Registration:
        try:
            return self._device.register(address, nbytes, writable=writable)
        except DeviceError as error:
            locked = sum(one.nbytes for one in self._all())
            raise DeviceError(f"{error}{why_not_locked(nbytes, locked)}") from error

    def _all(self) -> list[Registration]:
        return [*self._arenas, *(owned.registration for owned in self._owned.values())]

    def _owned_by(self, view: memoryview, start: int) -> tuple[_Key, _Owned]:
        owner = owner_of(view)
        with memoryview(owner) as whole:  # type: ignore[arg-type]
            base, total, writable = address_of(whole), whole.nbytes, not whole.readonly
        first, last = (start - base) // PIECE_BYTES, (start - base + view.nbytes - 1) // PIECE_BYTES
        key = id(owner), first, last
        address = base + first * PIECE_BYTES
        nbytes = min((last + 1) * PIECE_BYTES, total) - first * PIECE_BYTES
        known = self._owned.get(key)
        if known is not None and known.is_of(address, nbytes):
            return key, known
        # Not known, or a mapping that has moved since: what still uses the old one keeps it.
        made = _Owned(self._register(address, nbytes, writable=writable), None)
        try:
            made.owner = weakref.ref(owner, lambda _: self._forget(key, made))
        except TypeError:
            pass  # used for the moment only
        self._owned[key] = made
        if known is not None and not known.users:
            self.quarantine.close(known.registration)
        return key, made

    def _forget(self, key: _Key, owned: _Owned) -> None:
        if self._owned.get(key) is owned:
            del self._owned[key]
        self.quarantine.close(owned.registration)


def address_of(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).ctypes.data) if view.nbytes else 0


def owner_of(view: memoryview) -> object:
    """Return the object that owns the memory, through arrays and views of it."""
    owner: object = view.obj
    while True:
        if isinstance(owner, np.ndarray) and owner.base is not None:
            owner = owner.base
        elif isinstance(owner, memoryview):
            owner = owner.obj
        else:
            return owner


def _covers(registration: Registration, start: int, nbytes: int) -> bool:
    return registration.address <= start and start + nbytes <= registration.address + registration.nbytes
