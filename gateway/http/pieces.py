"""Large JSON, encoded in pieces between which the event loop runs."""

import asyncio
import time
from collections.abc import Iterable, Sequence

import msgspec

_SLICE_S = 0.002
_encode = msgspec.json.Encoder().encode


class TimeSlice:
    """A time slice of one encoding: it runs for some milliseconds, then lets the loop run everything else."""

    def __init__(self) -> None:
        self._began_s = time.perf_counter()

    async def pause(self) -> None:
        """Let the loop run if the slice is used up."""
        if time.perf_counter() - self._began_s > _SLICE_S:
            await asyncio.sleep(0)
            self._began_s = time.perf_counter()


async def encode_array(items: Iterable[object]) -> msgspec.Raw:
    """Return the items as a JSON array; the iterable makes each as it is asked for it."""
    time_slice, parts = TimeSlice(), list[bytes]()
    for item in items:
        parts.append(_encode(item))
        await time_slice.pause()
    return msgspec.Raw(b"[%b]" % b",".join(parts))


def join_arrays(arrays: Sequence[bytes]) -> msgspec.Raw:
    """Return encoded arrays, of which none is empty but a single one, as one array."""
    return msgspec.Raw(b"[%b]" % b",".join([array[1:-1] for array in arrays]))
