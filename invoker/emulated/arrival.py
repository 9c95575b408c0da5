"""Whether the bytes that some layers need have arrived: the one use that is made of an emulated image."""

from invoker.engine.contract import EngineError
from invoker.engine.image_ranges import bytes_of_layers
from registry.images.manifest import UNIT_BYTES, Manifest
from registry.images.verify import check_units


class NotArrived(EngineError):
    """Bytes that the layers need are not there, or not those of the image."""

    code = "start_failed"


def check_arrived(manifest: Manifest, image: memoryview, first: int, last: int) -> None:
    """Raise NotArrived unless all units that the layers `[first, last)` have a part of are whole."""
    wrong: set[int] = set()
    for start, end in bytes_of_layers(manifest, first, last):
        start = start // UNIT_BYTES * UNIT_BYTES
        end = min(-(-end // UNIT_BYTES) * UNIT_BYTES, manifest.nbytes)
        wrong.update(check_units(manifest, start, image[start:end]))
    if wrong:
        raise NotArrived(
            f"{manifest.architecture}: of the layers [{first}, {last}) {len(wrong)} units have not arrived, "
            f"the first is {min(wrong)}"
        )
