"""A time limit that costs nothing where there is nothing to wait for."""

import asyncio
from collections.abc import Coroutine, Generator
from typing import Any, TypeVar

T = TypeVar("T")


async def within(seconds: float, work: Coroutine[Any, Any, T]) -> T:
    """The outcome of `work`, or TimeoutError. A timer is set only if it has to wait at all."""
    try:
        waited_for = work.send(None)
    except StopIteration as done:
        result: T = done.value
        return result
    async with asyncio.timeout(seconds):
        return await _Begun(work, waited_for)


class _Begun:
    """The rest of a coroutine that has been run up to its first wait."""

    def __init__(self, work: Coroutine[Any, Any, T], waited_for: object) -> None:
        self._work = work
        self._waited_for = waited_for

    def __await__(self) -> Generator[Any, Any, Any]:
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
                return done.value
