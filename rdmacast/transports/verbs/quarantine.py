"""Memory that a device may still use, because it refused to let go of it."""

import logging

from rdmacast.errors import DeviceError
from rdmacast.transports.verbs.device import ReadGrant, Registration

logger = logging.getLogger(__name__)


class Quarantine:
    """Views of memory that stay mapped until the process ends, so that nothing else is put there."""

    def __init__(self) -> None:
        self._kept: list[tuple[object, memoryview | None]] = []
        self.nbytes = 0

    def __repr__(self) -> str:
        return f"Quarantine({len(self._kept)} pieces, {self.nbytes} bytes)"

    def close(self, used: Registration | ReadGrant, view: memoryview | None = None) -> None:
        """Close a use of memory; if the device refuses, keep `view`, if it is known, and count it."""
        if any(kept is used for kept, _ in self._kept):
            return
        try:
            used.close()
        except DeviceError as error:
            self.add(used, view, error)

    def add(self, used: object, view: memoryview | None, reason: Exception) -> None:
        """Keep memory that `used` may still read or write."""
        # Its pages stay taken by the kernel also where no view is known: they never become other memory.
        nbytes = getattr(used, "nbytes", 0) if view is None else view.nbytes
        self._kept.append((used, view))
        self.nbytes += nbytes
        logger.error(
            "%d bytes are quarantined until this process ends, as a device may still use them: %s",
            nbytes,
            reason,
        )
