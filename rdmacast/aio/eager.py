"""Coroutines that run up to their first wait at once: a time limit is free where nothing waits."""

from collections.abc import Awaitable, Coroutine, Generator
from typing import Any, Generic, TypeVar, cast

from rdmacast.aio.time_limit import TimeLimit

T = TypeVar("T")


class Ready(Generic[T]):
    """An awaitable with its result: a coroutine without its cost."""

    __slots__ = ("value",)

    def __init__(self, value: T) -> None:
        self.value = value

    def __await__(self) -> Generator[Any, Any, T]:
        yield from ()
        return self.value

    def send(self, _: None) -> Any:
        raise StopIteration(self.value)


COMPLETED = Ready(None)


class StartedCoroutine(Generic[T]):
    """The rest of a coroutine that has run up to its first wait; to be awaited once."""

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


def start_eagerly(work: Awaitable[T]) -> T | StartedCoroutine[T]:
    """Run a coroutine up to its first wait; return its result if there was none, else the rest of it."""
    coroutine = cast(Coroutine[Any, Any, T], work)
    try:
        waited_for = coroutine.send(None)
    except StopIteration as done:
        return cast(T, done.value)
    return StartedCoroutine(coroutine, waited_for)


async def run_within(seconds: float, work: Awaitable[T]) -> T:
    """Return the result of a coroutine, or raise TimeoutError. A timer is set only if it waits at all."""
    started = start_eagerly(work)
    if not isinstance(started, StartedCoroutine):
        return started
    with TimeLimit(seconds):
        return await started
