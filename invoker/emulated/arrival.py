"""The check that the bytes of some layers have arrived: the only read of an emulated image."""

from invoker.emulated.image import EmulatedPlan
from invoker.engine.contract import EngineError
from invoker.engine.image_ranges import layer_byte_ranges
from registry.config.emulation import parse_model
from registry.images.manifest import UNIT_BYTES, Manifest
from registry.images.verify import check_units


class ImageIncomplete(EngineError):
    """Bytes that the layers need are missing, or not those of the image."""

    code = "start_failed"


def check_arrived(manifest: Manifest, image: memoryview, first: int, last: int, base: int = 0) -> None:
    """Raise ImageIncomplete unless all bytes of the layers `[first, last)` are those of the image.

    `image` has its bytes from `base` on. Other bytes, also of the same unit, are not read.
    """
    plan = EmulatedPlan(parse_model(manifest.architecture))
    for start, end in layer_byte_ranges(manifest, first, last):
        inner = -(-start // UNIT_BYTES) * UNIT_BYTES
        outer = end if end == manifest.nbytes else end // UNIT_BYTES * UNIT_BYTES
        if inner > outer:  # the range is within one unit
            inner = outer = end
        whole = image[inner - base : outer - base]
        wrong = [unit * UNIT_BYTES for unit in check_units(manifest, inner, whole)] if len(whole) else []
        edges = ((start, inner), (outer, end))
        wrong += [edge_start for edge_start, stop in edges if not _same(plan, image, edge_start, stop, base)]
        if wrong:
            raise ImageIncomplete(
                f"{manifest.architecture}: of the layers [{first}, {last}) the bytes from {min(wrong)} on "
                "have not arrived"
            )


def _same(plan: EmulatedPlan, image: memoryview, start: int, end: int, base: int) -> bool:
    made = memoryview(bytearray(end - start))
    plan.read_into(start, made)
    return made == image[start - base : end - base]
