"""Tensors of an image: views where their offsets allow it, copies elsewhere."""

import pytest
import torch

from invoker.engine.contract import ModelSpec
from invoker.engine.factory import TorchEngineFactory
from invoker.engine.image_views import ImageViews
from registry.images.manifest import TensorEntry
from tests.fixtures.engine import MemoryRegion, cached_image
from tests.fixtures.registry_records import manifest

HEADER = 64


def _spec(*tensors: tuple[str, str, tuple[int, ...], int]) -> ModelSpec:
    entries = []
    position = HEADER
    for name, dtype, shape, nbytes in tensors:
        entries.append(TensorEntry(name=name, dtype=dtype, shape=shape, offset=position, nbytes=nbytes))
        position += nbytes
    made = manifest(("embed", 0, "", position), tensors=tuple(entries))
    return ModelSpec(manifest=made, config={}, dtype="float32", context_length=16)


@pytest.mark.parametrize(("flags", "view"), [(4, True), (3, False)])
def test_a_tensor_between_elements_is_copied(flags: int, view: bool) -> None:
    spec = _spec(("flags", "BOOL", (flags,), flags), ("a", "F32", (2,), 8), ("b", "F32", (1,), 4))
    region = MemoryRegion(spec.manifest.nbytes)
    values = torch.tensor([1.5, -2.0, 7.25])
    region.buffer[HEADER + flags :] = values.numpy().tobytes()
    views = ImageViews(spec, region)
    found = views.view("a", (2,))
    stacked = views.stacked([("a", (2,)), ("b", (1,))])
    assert found.tolist() == [1.5, -2.0] and stacked.tolist() == [1.5, -2.0, 7.25]
    region.buffer[HEADER + flags :] = bytes(12)
    assert (found.tolist() == [0, 0], stacked.tolist() == [0, 0, 0]) == (view, view)


def test_only_views_are_bound_before_their_bytes_arrive() -> None:
    spec, _, _ = cached_image("llama")
    factory = TorchEngineFactory()
    assert factory.binds_early(spec)
    odd = TensorEntry(name="odd", dtype="F32", shape=(1,), offset=spec.manifest.nbytes + 1, nbytes=4)
    with_odd = manifest(("embed", 0, "", odd.offset + 4), tensors=(*spec.manifest.tensors, odd))
    assert not factory.binds_early(ModelSpec(manifest=with_odd, config={}, dtype="float32", context_length=1))
