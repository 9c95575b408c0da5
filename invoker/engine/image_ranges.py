"""The bytes of a model image that a range of its layers needs."""

from registry.images.manifest import Manifest


def layer_byte_ranges(manifest: Manifest, first: int, last: int) -> tuple[tuple[int, int], ...]:
    """Return the byte ranges `[start, end)` that must have arrived before the layers `[first, last)` can run.

    Layer 0 needs the embedding too, the last layer the final norm and the head; a tied head is the embedding.
    """
    found: list[tuple[int, int]] = []
    for span in manifest.layers:
        place = {"embed": 0, "head": manifest.num_layers - 1}.get(span.kind, span.index)
        if not first <= place < last or span.start == span.end:
            continue
        if found and found[-1][1] == span.start:
            found[-1] = (found[-1][0], span.end)
        else:
            found.append((span.start, span.end))
    return tuple(found)
