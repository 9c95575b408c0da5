"""Publishes casts: what was planned, once and before the first call to a node, and who could not begin."""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from registry.cast import CastProgress, CastRecord, CastState
from registry.errors import RegistryError, RemoteError
from registry.state import ClusterState

log = logging.getLogger(__name__)

_PUBLISH_S = 1.0  # a start is held up no longer
_REMEMBERED = 256


class CastRecords:
    def __init__(self, state: ClusterState, publish_s: float = _PUBLISH_S) -> None:
        self._state = state
        self._publish_s = publish_s
        self._told: OrderedDict[tuple[str, int], asyncio.Event] = OrderedDict()

    def __repr__(self) -> str:
        return f"<CastRecords {len(self._told)}>"

    @asynccontextmanager
    async def part(self, record: CastRecord | None, node: str) -> AsyncIterator[None]:
        """Inside, the node is called that is to take part, if there is a cast."""
        if record is None:
            yield
            return
        await self.tell(record)
        try:
            yield
        except RegistryError as error:
            reason = error.message if isinstance(error, RemoteError) else str(error)
            await self.failed(record, node, reason)
            raise

    async def tell(self, record: CastRecord) -> None:
        """Have the record published, or be told that it cannot be: the cast goes on without."""
        key = (record.cast_id, record.epoch)
        while (told := self._told.get(key)) is not None:
            await told.wait()
            if self._told.get(key) is told:
                return
        told = self._told[key] = asyncio.Event()
        if len(self._told) > _REMEMBERED:
            self._told.popitem(last=False)
        try:
            async with asyncio.timeout(self._publish_s):
                await self._state.put_cast(record)
        except (RegistryError, TimeoutError) as error:
            log.warning("cast %s of %s is not published: %s", record.cast_id, record.function, error)
        except BaseException:  # this start was given up: the next one that takes part tells of it
            self._told.pop(key, None)
            raise
        finally:
            told.set()
        log.info(
            "cast %s of %s:%d from %d to %d nodes: %s",
            record.cast_id,
            record.function,
            record.version,
            len(record.sources),
            len(record.targets),
            record.reason,
        )

    async def failed(self, record: CastRecord, node: str, reason: str) -> None:
        """The call that made the node take part has failed: said in its stead, unless it told anything."""
        progress = CastProgress(
            cast_id=record.cast_id,
            node=node,
            state=CastState.FAILED,
            blocks=-(-record.nbytes // record.block_bytes),
            held=0,
            seconds=0.0,
            updated_at=0.0,  # before whatever it told
            error=reason,
            epoch=record.epoch,
        )
        try:
            async with asyncio.timeout(self._publish_s):
                await self._state.put_cast_progress(progress)
        except (RegistryError, TimeoutError) as error:
            log.info("cast %s: the failure of %s is not published: %s", record.cast_id, node, error)
