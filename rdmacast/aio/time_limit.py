"""A time limit for what a task awaits."""

import asyncio
from types import TracebackType


class TimeLimit:
    """`with TimeLimit(seconds): await …`: as asyncio.timeout, but for a third of its price."""

    __slots__ = ("_cancelling", "_rang", "_task", "_timer")

    def __init__(self, seconds: float) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._cancelling = task.cancelling()
        self._rang = False
        self._timer = task.get_loop().call_later(seconds, self._ring)

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
        if self._rang and self._task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            raise TimeoutError from error

    def _ring(self) -> None:
        self._rang = True
        self._task.cancel()
