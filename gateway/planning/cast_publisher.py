"""Publishes cast records, once and before the first call to a node, and failures of nodes to join."""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from registry.errors import RegistryError, reason_of
from registry.records.cast import CastProgress, CastRecord, CastState
from registry.state import ClusterState

log = logging.getLogger(__name__)

_PUBLISH_S = 1.0  # the longest that publishing delays a start
_MAX_PUBLISHED = 256


class CastPublisher:
    """A publisher of casts; a failure to publish does not stop the cast."""

    def __init__(self, state: ClusterState, publish_s: float = _PUBLISH_S) -> None:
        self._state = state
        self._publish_s = publish_s
        self._published: OrderedDict[tuple[str, int], asyncio.Event] = OrderedDict()

    def __repr__(self) -> str:
        return f"<CastPublisher {len(self._published)}>"

    @asynccontextmanager
    async def joining(self, record: CastRecord | None, node: str) -> AsyncIterator[None]:
        """Publish the cast before the body calls `node` to join it, and a failure of that call after it."""
        if record is None:
            yield
            return
        await self.publish(record)
        try:
            yield
        except RegistryError as error:
            await self.publish_failure(record, node, reason_of(error))
            raise

    async def publish(self, record: CastRecord) -> None:
        """Publish the record once; log a failure, since the cast continues without its record."""
        key = (record.cast_id, record.epoch)
        while (published := self._published.get(key)) is not None:
            await published.wait()
            if self._published.get(key) is published:
                return
        published = self._published[key] = asyncio.Event()
        if len(self._published) > _MAX_PUBLISHED:
            self._published.popitem(last=False)
        try:
            async with asyncio.timeout(self._publish_s):
                await self._state.put_cast(record)
        except (RegistryError, TimeoutError) as error:
            log.warning("cast %s of %s: not published: %s", record.cast_id, record.function, error)
        except BaseException:  # this start was cancelled: the next one of the cast publishes it
            self._published.pop(key, None)
            raise
        finally:
            published.set()
        log.info(
            "cast %s of %s:%d: %d sources, %d targets: %s",
            record.cast_id,
            record.function,
            record.version,
            len(record.sources),
            len(record.targets),
            record.reason,
        )

    async def publish_failure(self, record: CastRecord, node: str, reason: str) -> None:
        """Publish the failure of a node that could not be called, unless it published progress itself."""
        progress = CastProgress(
            cast_id=record.cast_id,
            node=node,
            state=CastState.FAILED,
            blocks=-(-record.nbytes // record.block_bytes),
            held=0,
            seconds=0.0,
            updated_at=0.0,  # older than any progress of the node
            error=reason,
            epoch=record.epoch,
        )
        try:
            async with asyncio.timeout(self._publish_s):
                await self._state.put_cast_progress(progress)
        except (RegistryError, TimeoutError) as error:
            log.info("cast %s: failure of node %s not published: %s", record.cast_id, node, error)
