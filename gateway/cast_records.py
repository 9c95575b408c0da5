"""Publishes what casts were planned, each once, before the first call to a node of it."""

import asyncio
import logging
from collections import OrderedDict

from registry.cast import CastRecord
from registry.errors import RegistryError
from registry.state import ClusterState

log = logging.getLogger(__name__)

_PUBLISH_S = 1.0  # a start is held up no longer
_REMEMBERED = 256


class CastRecords:
    def __init__(self, state: ClusterState) -> None:
        self._state = state
        self._told: OrderedDict[tuple[str, int], asyncio.Event] = OrderedDict()

    def __repr__(self) -> str:
        return f"<CastRecords {len(self._told)}>"

    async def tell(self, record: CastRecord) -> None:
        """Have the record published, or be told that it cannot be: the cast goes on without."""
        key = (record.cast_id, record.epoch)
        told = self._told.get(key)
        if told is not None:
            await told.wait()
            return
        told = self._told[key] = asyncio.Event()
        if len(self._told) > _REMEMBERED:
            self._told.popitem(last=False)
        try:
            async with asyncio.timeout(_PUBLISH_S):
                await self._state.put_cast(record)
        except (RegistryError, TimeoutError) as error:
            log.warning("cast %s of %s is not published: %s", record.cast_id, record.function, error)
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
