"""What instances take of an arena besides their image: a guess, and what failed starts taught.

Only the node knows how large a KV cache must be at least. A start that found no room there tells that
it needs more than there was, so that the next one goes where there is more, or idle ones go first.
"""

from dataclasses import dataclass

from gateway.directory import VersionKey
from registry.function import FunctionVersion, Task

_KV_SHARE = 8  # the KV cache is guessed at this part of the image
_KEPT_S = 60.0  # then it is tried anew: what was in the way may have been something else


@dataclass(frozen=True, slots=True, kw_only=True)
class Lesson:
    """A start found no room for `least_bytes` besides the image, for the `reason` that the node gave."""

    least_bytes: int
    reason: str
    until: float


class Needs:
    def __init__(self) -> None:
        self._lessons: dict[VersionKey, Lesson] = {}

    def __repr__(self) -> str:
        return f"<Needs {len(self._lessons)} learned>"

    def forget_old(self, now: float) -> None:
        self._lessons = {key: lesson for key, lesson in self._lessons.items() if lesson.until > now}

    def learn(self, key: VersionKey, lacked_bytes: int, reason: str, now: float) -> None:
        """Besides its image a start of the version did not fit into `lacked_bytes`."""
        least = max(lacked_bytes + 1, self.least_bytes(key))
        self._lessons[key] = Lesson(least_bytes=least, reason=reason, until=now + _KEPT_S)

    def least_bytes(self, key: VersionKey) -> int:
        """What is known to be needed besides the image."""
        lesson = self._lessons.get(key)
        return 0 if lesson is None else lesson.least_bytes

    def wish_bytes(self, version: FunctionVersion) -> int:
        """What to reserve besides the image."""
        guess = version.image_bytes // _KV_SHARE if version.image and version.task is Task.GENERATE else 0
        return max(guess, self.least_bytes(VersionKey(version.function, version.version)))

    def reason(self, key: VersionKey) -> str:
        """Why the last start found no room, "" if none failed so."""
        lesson = self._lessons.get(key)
        return "" if lesson is None else lesson.reason
