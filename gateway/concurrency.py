"""How many requests a key has under way in this gateway, and the limit that its record sets."""

from collections.abc import Iterator
from contextlib import contextmanager

from gateway.errors import TooMany
from registry.api_key import ApiKey

RETRY_AFTER_S = 1


class KeyConcurrency:
    """Counts requests by key. Keys without a limit are not counted."""

    def __init__(self) -> None:
        self._under_way: dict[str, int] = {}

    def __repr__(self) -> str:
        return f"<KeyConcurrency {self._under_way}>"

    @contextmanager
    def admit(self, key: ApiKey) -> Iterator[None]:
        """Hold one of the key's places. Raises TooMany at once if all are taken."""
        if key.max_concurrent is None:
            yield
            return
        taken = self._under_way.get(key.id, 0)
        if taken >= key.max_concurrent:
            raise TooMany(
                f"this key may have {key.max_concurrent} requests under way at once",
                retry_after_s=RETRY_AFTER_S,
            )
        self._under_way[key.id] = taken + 1
        try:
            yield
        finally:
            left = self._under_way[key.id] - 1
            if left:
                self._under_way[key.id] = left
            else:
                del self._under_way[key.id]
