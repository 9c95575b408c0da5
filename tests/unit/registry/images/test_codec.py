"""Manifests: what is encoded decodes to the same, and a malformed one is refused with its reason."""

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from registry.errors import CorruptImage
from registry.images.codec import decode_manifest, encode_manifest, manifest_digest
from registry.images.manifest import MANIFEST_FORMAT, UNIT_BYTES, LayerSpan, Manifest, TensorEntry
from registry.images.verify import check_units, unit_checksums

IMAGE = bytes(range(256)) * 1024 + b"end" * 300
NBYTES = len(IMAGE)


def manifest() -> Manifest:
    return Manifest(
        format=MANIFEST_FORMAT,
        architecture="LlamaForCausalLM",
        model_type="llama",
        tied_head=True,
        num_layers=1,
        nbytes=NBYTES,
        sha256="ab" * 32,
        tensors=(
            TensorEntry(name="embed", dtype="F32", shape=(4, 8), offset=0, nbytes=128),
            TensorEntry(name="layer", dtype="BF16", shape=(3,), offset=256, nbytes=6),
        ),
        layers=(
            LayerSpan(kind="embed", index=0, tower="", start=0, end=256),
            LayerSpan(kind="layer", index=0, tower="", start=256, end=512),
            LayerSpan(kind="head", index=0, tower="", start=512, end=NBYTES),
        ),
        units=unit_checksums(memoryview(IMAGE)),
    )


def test_round_trip() -> None:
    encoded = encode_manifest(manifest())
    assert decode_manifest(encoded) == manifest()
    assert encode_manifest(decode_manifest(encoded)) == encoded
    assert len(manifest_digest(encoded)) == 64


ENTRY = manifest().tensors[1]
SPANS = manifest().layers


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (replace(manifest(), format=2), "format 2"),
        (replace(manifest(), sha256="../x"), "sha256"),
        (replace(manifest(), sha256="AB" * 32), "sha256"),
        (replace(manifest(), nbytes=-1), "nbytes"),
        (replace(manifest(), nbytes=1 << 80), "nbytes"),
        (replace(manifest(), units=b"\0" * 16), "16 bytes of unit checksums, 2 units need 32"),
        (replace(manifest(), tensors=(replace(ENTRY, dtype="Q4"),)), "unknown dtype"),
        (replace(manifest(), tensors=(replace(ENTRY, offset=128),)), "not aligned"),
        (replace(manifest(), tensors=(replace(ENTRY, offset=-256),)), "overlaps"),
        (replace(manifest(), tensors=(ENTRY, replace(ENTRY, name="other"))), "'other' overlaps"),
        (replace(manifest(), tensors=(ENTRY, replace(ENTRY, offset=512))), "twice"),
        (replace(manifest(), tensors=(replace(ENTRY, nbytes=8),)), "does not match"),
        (replace(manifest(), tensors=(replace(ENTRY, shape=(-3, -1)),)), "bad shape"),
        (replace(manifest(), tensors=(replace(ENTRY, offset=1 << 30),)), "beyond the image"),
        (replace(manifest(), layers=SPANS[:2]), "do not cover"),
        (replace(manifest(), layers=(SPANS[0], SPANS[2])), "contiguous"),
        (replace(manifest(), layers=(replace(SPANS[0], kind="magic"), *SPANS[1:])), "kind"),
        (replace(manifest(), layers=(replace(SPANS[0], index=-1), *SPANS[1:])), "index"),
        (replace(manifest(), num_layers=7), "num_layers is 7, there are 1"),
    ],
)
def test_a_broken_rule_is_named(broken: Manifest, message: str) -> None:
    with pytest.raises(CorruptImage, match=message):
        decode_manifest(encode_manifest(broken))


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"{}", b"\xff", b'{"format": "1"}', b"[" * 100_000])
def test_no_json_no_manifest(raw: bytes) -> None:
    with pytest.raises(CorruptImage, match="manifest"):
        decode_manifest(raw)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=200, deadline=None)
@given(data=st.data(), value=JSON)
def test_any_value_anywhere_decodes_or_is_refused(data: st.DataObject, value: object) -> None:
    tree = json.loads(encode_manifest(manifest()))
    place = tree
    while True:
        key = data.draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))
        if not isinstance(place[key], (dict, list)) or not place[key] or data.draw(st.booleans()):
            place[key] = value
            break
        place = place[key]
    try:
        assert isinstance(decode_manifest(json.dumps(tree).encode()), Manifest)
    except CorruptImage as error:
        assert str(error).startswith("manifest: ")


def test_check_units_finds_the_damaged_unit() -> None:
    whole = bytearray(IMAGE)
    assert check_units(manifest(), 0, memoryview(whole)) == []
    whole[UNIT_BYTES + 5] ^= 1
    assert check_units(manifest(), 0, memoryview(whole)) == [1]
    assert check_units(manifest(), 0, memoryview(whole)[:UNIT_BYTES]) == []
    assert check_units(manifest(), UNIT_BYTES, memoryview(whole)[UNIT_BYTES:]) == [1]
    assert check_units(manifest(), 0, memoryview(b"")) == []


@pytest.mark.parametrize(
    ("offset", "nbytes"), [(1, UNIT_BYTES), (0, 100), (UNIT_BYTES, UNIT_BYTES), (-UNIT_BYTES, 0)]
)
def test_check_units_takes_whole_units_only(offset: int, nbytes: int) -> None:
    with pytest.raises(ValueError, match="unit"):
        check_units(manifest(), offset, memoryview(bytes(nbytes)))
