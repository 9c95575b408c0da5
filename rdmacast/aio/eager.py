"""Coroutines that are run up to their first wait at once: a time limit costs nothing where there is nothing
to wait for."""

from collections.abc import Awaitable, Coroutine, Generator
from typing import Any, Generic, TypeVar, cast

from registry.time_limit import TimeLimit

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
            except BaseException as error:  # passed on into the work
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


async def within(seconds: float, work: Awaitable[T]) -> T:
    """The outcome of a coroutine, or TimeoutError. A timer is set only if it has to wait at all."""
    begun = begin(work)
    if not isinstance(begun, Begun):
        return begun
    with TimeLimit(seconds):
        return await begun
