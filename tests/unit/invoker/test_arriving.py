"""Which layers can run by what has arrived."""

import pytest

from invoker.instances.device_copy import CopiedLayers, pieces_of
from tests.fixtures.checkpoints import LAYERS
from tests.fixtures.engine import cached_image


@pytest.mark.parametrize("kind", ["llama-tied", "qwen2-tied", "gpt2", "llama"])
def test_layers_are_complete_one_by_one_as_the_image_comes_in_its_order(kind: str) -> None:
    manifest = cached_image(kind)[0].manifest
    pieces = sorted(pieces_of(manifest, 4096), key=lambda piece: piece.start)
    assert [piece.start for piece in pieces] == [0, *(piece.end for piece in pieces[:-1])]
    held = CopiedLayers(pieces, LAYERS)
    complete = [(held.bits, piece.end) for piece in pieces if held.add(piece)]
    assert [bits for bits, _ in complete] == [(1 << count) - 1 for count in range(1, LAYERS + 1)]
    # No layer but the last waits for the end of the image, also where the head is the embedding.
    layers = [span.end for span in manifest.layers if span.kind == "layer"]
    assert [end for _, end in complete] == [*layers[:-1], manifest.nbytes]


def test_a_tied_model_that_comes_in_halves_is_held_in_halves() -> None:
    manifest = cached_image("llama-tied")[0].manifest
    assert manifest.tied_head
    middle = next(span.end for span in manifest.layers if span.kind == "layer" and span.index == 1)
    for first, bits in ((0, 0b0011), (middle, 0b1100)):
        held = CopiedLayers(pieces := pieces_of(manifest, 4096), LAYERS)
        for piece in pieces:
            if (piece.start < middle) == (first == 0):
                held.add(piece)
        assert held.bits == bits
