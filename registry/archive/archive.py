"""The parts of the archive of one process."""

from dataclasses import dataclass
from typing import Self

from registry.archive.archiver import LedgerArchiver
from registry.archive.erasure import TenantEraser
from registry.archive.files import ArchiveFiles
from registry.archive.ledger import ArchivedLedger
from registry.clock import Clock
from registry.images.store import BlobStore
from registry.redis.state import RedisState


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerArchive:
    """The whole ledger, and the writers of its archive."""

    ledger: ArchivedLedger
    archiver: LedgerArchiver
    eraser: TenantEraser
    files: ArchiveFiles

    @classmethod
    def open(cls, state: RedisState, store: BlobStore, clock: Clock) -> Self:
        """Return the archive; close it with `aclose`."""
        files = ArchiveFiles(store)
        return cls(
            ledger=ArchivedLedger(state, files, clock),
            archiver=LedgerArchiver(state, files, clock),
            eraser=TenantEraser(state, files, clock),
            files=files,
        )

    async def digests(self) -> frozenset[str]:
        """Return the digests of all its blobs."""
        return frozenset(file.digest for file in (await self.ledger.index()).files)

    async def aclose(self) -> None:
        """Close its files."""
        await self.files.aclose()
