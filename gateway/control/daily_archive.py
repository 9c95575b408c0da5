"""The daily archiving of the usage ledger, by the gateway that holds the controller lease."""

import asyncio
import logging

from gateway.control.leadership import Leadership
from gateway.core.audit_writer import AuditWriter
from rdmacast.aio.shielded import run_shielded
from registry.archive.archiver import LedgerArchiver
from registry.clock import Clock
from registry.errors import Conflict, RegistryError

log = logging.getLogger(__name__)

CHECK_S = 300.0


class ArchiveLag:
    """Since when the archive is due, as of the last check of the gateway that archives."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._is_checked = False
        self._due_since: float | None = None

    def set(self, due_since: float | None) -> None:
        """Record since when (Unix seconds) the archive is due; None if it is not."""
        self._is_checked, self._due_since = True, due_since

    def forget(self) -> None:
        """Record that another gateway archives."""
        self._is_checked = False

    def seconds(self) -> float | None:
        """Return how long the archive has been due, 0 if it is not; None if this gateway has not checked."""
        if not self._is_checked:
            return None
        return 0.0 if self._due_since is None else max(0.0, self._clock.wall_s() - self._due_since)


class DailyArchive:
    """A loop that archives the days of the ledger that have closed."""

    def __init__(
        self,
        archiver: LedgerArchiver,
        leadership: Leadership,
        audit: AuditWriter,
        lag: ArchiveLag,
        *,
        check_s: float = CHECK_S,
    ) -> None:
        self._archiver = archiver
        self._audit = audit
        self._lag = lag
        self._leadership = leadership
        self._check_s = check_s

    async def run(self) -> None:
        """Look for closed days now and then, until cancelled."""
        while True:
            await asyncio.sleep(self._check_s)
            try:
                if self._leadership.epoch is None:
                    self._lag.forget()
                elif await self._is_due():
                    await self._archive()
                    await self._is_due()
            except Conflict as error:
                log.info("ledger archive: %s", error)
            except RegistryError as error:
                log.warning("ledger archive: failed, retried in %.0f s: %s", self._check_s, error)
            except Exception:  # whatever it is, the gateway serves on and the rows stay in Redis
                log.exception("ledger archive: failed, retried in %.0f s", self._check_s)

    async def _is_due(self) -> bool:
        since = await self._archiver.due_since()
        self._lag.set(since)
        return since is not None

    async def _archive(self) -> None:
        entry_id = await self._audit.begin_own("usage.archive")
        outcome = 500
        try:
            async for step in self._archiver.archive():
                if step.file is not None:
                    log.info("ledger archive: %d %s of day %d", step.file.rows, step.kind.value, step.day)
                if self._leadership.epoch is None:
                    log.info("ledger archive: left to the next controller")
                    return
            outcome = 200
        finally:
            await run_shielded(self._audit.end(entry_id, outcome))
