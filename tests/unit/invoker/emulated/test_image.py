"""Images of emulated models: real bytes, the same wherever they are generated, incompressible."""

import json
import struct
import zlib
from dataclasses import replace

import pytest

from benchmarks.scaleout.profiles import find_profile
from invoker.emulated.arrival import ImageIncomplete, check_arrived
from invoker.emulated.image import EmulatedPlan
from invoker.emulated.profiles import UnknownProfile
from invoker.engine.image_ranges import layer_byte_ranges
from registry.config.emulation import EmulatedModel
from registry.images.codec import decode_manifest
from registry.images.plan import image_chunks
from tests.fixtures.emulated import MODEL, emulated_image


def test_any_range_is_the_same_bytes() -> None:
    plan, whole = EmulatedPlan(EmulatedModel(name="llama2-7b", scale=3000)), bytearray()
    for view in image_chunks(plan):
        whole += view
    assert len(whole) == plan.nbytes > 4 << 20
    for start, count in ((0, 1), (1, 5000), ((1 << 20) - 3, 7), (plan.nbytes - 9, 9), (12345, 3 << 20)):
        found = bytearray(count)
        plan.read_into(start, memoryview(found))
        assert found == whole[start : start + count]
    assert b"".join(bytes(view) for view in image_chunks(plan, offset=777)) == whole[777:]
    assert len(zlib.compress(whole, 1)) > 0.99 * len(whole)


def test_its_manifest_is_one() -> None:
    image = emulated_image()
    manifest = decode_manifest(image.encoded)
    profile = find_profile("h800-llama2-7b/10000")
    assert manifest.architecture == "emulated:llama2-7b/10000" == str(MODEL)
    assert (manifest.layers, manifest.nbytes, manifest.num_layers) == (profile.spans, profile.image_bytes, 32)
    other = EmulatedPlan(EmulatedModel(name="llama2-7b", scale=10_001))
    first = manifest.tensors[0].offset
    assert bytes(next(image_chunks(other, first)))[:4096] != image.data[first : first + 4096]
    (header,) = struct.unpack("<Q", image.data[:8])
    assert json.loads(image.data[8 : 8 + header]).keys() - {"__metadata__"} == {
        tensor.name for tensor in manifest.tensors
    }


def test_variants_are_other_images_of_the_same_layout() -> None:
    first, second = (emulated_image(replace(MODEL, variant=variant)) for variant in (0, 1))
    assert first.manifest.layers == second.manifest.layers
    assert first.manifest.sha256 != second.manifest.sha256
    check_arrived(second.manifest, memoryview(bytearray(second.data)), 0, 32)
    with pytest.raises(ImageIncomplete):
        check_arrived(second.manifest, memoryview(bytearray(first.data)), 0, 32)


def test_unknown_models_are_named() -> None:
    with pytest.raises(UnknownProfile, match="no emulated model 'gpt-5': use llama2-7b, llama2-13b"):
        EmulatedPlan(EmulatedModel(name="gpt-5"))


@pytest.mark.parametrize("scale", [10_000, 300])  # layers within a unit, and of several
@pytest.mark.parametrize("layers", [(0, 1), (10, 16), (31, 32), (0, 32)])
def test_missing_bytes_are_detected(scale: int, layers: tuple[int, int]) -> None:
    image = emulated_image(EmulatedModel(name="llama2-7b", scale=scale))
    here = bytearray(b"\xff" * len(image.data))
    ranges = layer_byte_ranges(image.manifest, *layers)
    for start, end in ranges:
        here[start:end] = image.data[start:end]
    check_arrived(image.manifest, memoryview(here), *layers)
    for start, end in ranges:
        for at in (start, (start + end) // 2, end - 1):
            here[at] ^= 1
            with pytest.raises(ImageIncomplete, match="have not arrived"):
                check_arrived(image.manifest, memoryview(here), *layers)
            here[at] ^= 1


def test_more_layers_than_have_arrived_are_refused() -> None:
    image = emulated_image()
    here = bytearray(len(image.data))
    for start, end in layer_byte_ranges(image.manifest, 10, 16):
        here[start:end] = image.data[start:end]
    for layers in ((9, 16), (10, 17), (0, 32), (20, 22)):
        with pytest.raises(ImageIncomplete):
            check_arrived(image.manifest, memoryview(here), *layers)
