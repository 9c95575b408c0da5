"""Coroutines that are run up to their first wait at once: a time limit costs nothing where there is nothing
to wait for."""

import asyncio
from collections.abc import Awaitable, Coroutine, Generator
from types import TracebackType
from typing import Any, Generic, TypeVar, cast

T = TypeVar("T")


class Begun(Generic[T]):
    """The rest of a coroutine that has been run up to its first wait; to be awaited, once."""

    __slots__ = ("_waited_for", "_work")

    def __init__(self, work: Coroutine[Any, Any, T], waited_for: object) -> None:
        self._work = work
        self._waited_for = waited_for

    def __await__(self) -> Generator[Any, Any, T]:
        work, waited_for = self._work, self._waited_for
        while True:
            value, failure = None, None
            try:
                value = yield waited_for
            except BaseException as error:
                failure = error
            try:
                waited_for = work.send(value) if failure is None else work.throw(failure)
            except StopIteration as done:
                return cast(T, done.value)


def begin(work: Awaitable[T]) -> T | Begun[T]:
    """Run a coroutine up to its first wait: its outcome if there was none, else the rest of it."""
    coroutine = cast(Coroutine[Any, Any, T], work)
    try:
        waited_for = coroutine.send(None)
    except StopIteration as done:
        return cast(T, done.value)
    return Begun(coroutine, waited_for)


class Limit:
    """`with Limit(seconds): await …`: as asyncio.timeout, for less."""

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


async def within(seconds: float, work: Awaitable[T]) -> T:
    """The outcome of a coroutine, or TimeoutError. A timer is set only if it has to wait at all."""
    begun = begin(work)
    if not isinstance(begun, Begun):
        return begun
    with Limit(seconds):
        return await begun
