"""A bounded cache of the latest casts, folded from the change feed. Pure."""

from collections.abc import Iterable, Iterator

from registry.records.cast import CastRecord

_MAX_CASTS = 256


class CastCache:
    """The latest casts, each by its latest epoch."""

    def __init__(self, records: Iterable[CastRecord] = ()) -> None:
        self._records: dict[str, CastRecord] = {}
        for record in sorted(records, key=lambda one: one.started_at):
            self.update(record)

    def __repr__(self) -> str:
        return f"<CastCache {list(self._records)}>"

    def __iter__(self) -> Iterator[CastRecord]:
        """Iterate over the casts, most recently changed first."""
        return reversed(self._records.values())

    def update(self, record: CastRecord) -> None:
        """Store the record unless a later epoch of the cast is known."""
        known = self._records.pop(record.cast_id, record)
        self._records[record.cast_id] = record if record.epoch >= known.epoch else known
        while len(self._records) > _MAX_CASTS:
            del self._records[next(iter(self._records))]

    def of_image(self, image: str) -> list[CastRecord]:
        """Return the casts of an image, the latest first."""
        return [record for record in self if record.image == image]
