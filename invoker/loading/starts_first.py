"""The precedence of starts over background work on images."""

import asyncio
from collections.abc import Callable

_STEP_S = 0.05
_LIMIT_S = 60.0


class StartsFirst:
    """The pauses of one piece of background work while its node starts or loads something.

    They are `limit_s` long at most in all, so that the work ends on a node that always starts something.
    """

    def __init__(
        self, is_busy: Callable[[], bool], *, limit_s: float = _LIMIT_S, step_s: float = _STEP_S
    ) -> None:
        self._is_busy = is_busy
        self._left_s = limit_s
        self._step_s = step_s

    def __repr__(self) -> str:
        return f"<StartsFirst waits for at most {self._left_s:.1f} s>"

    async def wait(self, quiet_s: float = 0.0) -> None:
        """Wait until the node has not been busy for `quiet_s`, or the limit is reached."""
        found_quiet_s = 0.0
        while self._left_s > 0:
            if self._is_busy():
                found_quiet_s = 0.0
            elif found_quiet_s >= quiet_s:
                return
            else:
                found_quiet_s += self._step_s
            self._left_s -= self._step_s
            await asyncio.sleep(self._step_s)
