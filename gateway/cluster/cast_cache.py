"""The casts that this gateway heard of: a fold of the feed, bounded. Pure."""

from collections.abc import Iterable, Iterator

from registry.cast import CastRecord

_KEPT = 256


class KnownCasts:
    """The latest casts, each by its latest epoch."""

    def __init__(self, records: Iterable[CastRecord] = ()) -> None:
        self._records: dict[str, CastRecord] = {}
        for record in sorted(records, key=lambda one: one.started_at):
            self.put(record)

    def __repr__(self) -> str:
        return f"<KnownCasts {list(self._records)}>"

    def __iter__(self) -> Iterator[CastRecord]:
        """Those heard of last come first."""
        return reversed(self._records.values())

    def put(self, record: CastRecord) -> None:
        known = self._records.pop(record.cast_id, record)
        self._records[record.cast_id] = record if record.epoch >= known.epoch else known
        while len(self._records) > _KEPT:
            del self._records[next(iter(self._records))]

    def of(self, image: str) -> list[CastRecord]:
        """Casts of an image, the latest first."""
        return [record for record in self if record.image == image]
