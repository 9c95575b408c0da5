"""The modules of pyverbs, which is optional, and its errors as DeviceError."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from rdmacast.errors import DeviceError, NoTransport

_MEANINGS = {
    "RETRY_EXC_ERR": "the peer does not answer",
    "REM_ACCESS_ERR": "the peer refuses access to that memory",
    "WR_FLUSH_ERR": "the queue pair had failed before",
    "LOC_PROT_ERR": "our own memory is not registered",
}


@dataclass(frozen=True, slots=True)
class Pyverbs:
    """The modules of pyverbs. Untyped, as it has no types."""

    addr: Any
    cq: Any
    device: Any
    mr: Any
    pd: Any
    qp: Any
    wr: Any
    enums: Any
    error: Any

    @property
    def faults(self) -> dict[int, str]:
        """The names of faults by the status of a completion."""
        names = {name: name.removeprefix("IBV_WC_") for name in dir(self.enums) if name.endswith("_ERR")}
        return {
            int(getattr(self.enums, name)): f"{short}, {_MEANINGS[short]}" if short in _MEANINGS else short
            for name, short in names.items()
            if name.startswith("IBV_WC_")
        }


def load() -> Pyverbs:
    """Import pyverbs. Raises NoTransport if it or the libraries that it needs are absent."""
    try:
        try:
            enums = import_module("pyverbs.libibverbs_enums")
        except ModuleNotFoundError:
            enums = import_module("pyverbs.enums")  # before version 58
        names = ("addr", "cq", "device", "mr", "pd", "qp", "wr")
        modules = {name: import_module(f"pyverbs.{name}") for name in names}
        return Pyverbs(**modules, enums=enums, error=import_module("pyverbs.pyverbs_error").PyverbsError)
    except ImportError as error:
        raise NoTransport(f"pyverbs cannot be imported: {error}") from error


@contextmanager
def refusals(verbs: Pyverbs, what: str) -> Iterator[None]:
    """Raise DeviceError for what the device refuses inside."""
    try:
        yield
    except verbs.error as error:
        raise DeviceError(f"{what}: {str(error).strip()}") from error
