"""Manifests: what is encoded decodes to the same, and a malformed one is refused with its reason."""

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from registry.errors import CorruptImage
from registry.images.codec import decode_manifest, encode_manifest, manifest_digest
from registry.images.manifest import HEADERLESS_FORMAT, UNIT_BYTES, Manifest, TensorEntry
from registry.images.verify import check_units, unit_checksums
from tests.fixtures.registry_records import manifest

IMAGE = bytes(range(256)) * 1024 + b"end" * 300
NBYTES = len(IMAGE)


def made() -> Manifest:
    return manifest(
        ("embed", 0, "", 256),
        ("layer", 0, "", 6),
        ("head", 0, "", NBYTES - 262),
        tied_head=True,
        sha256="ab" * 32,
        tensors=(
            TensorEntry(name="embed", dtype="F32", shape=(4, 8), offset=128, nbytes=128),
            TensorEntry(name="layer", dtype="BF16", shape=(3,), offset=256, nbytes=6),
            TensorEntry(name="head", dtype="U8", shape=(NBYTES - 262,), offset=262, nbytes=NBYTES - 262),
        ),
        units=unit_checksums(memoryview(IMAGE)),
    )


def headerless() -> Manifest:
    """Return a manifest of an earlier release: there are holes, also before the first tensor."""
    first = replace(made().tensors[0], offset=0)
    return replace(made(), format=HEADERLESS_FORMAT, tensors=(first, made().tensors[1]))


def test_images_of_an_earlier_release_are_read() -> None:
    assert decode_manifest(encode_manifest(headerless())) == headerless()


def test_round_trip() -> None:
    encoded = encode_manifest(made())
    assert decode_manifest(encoded) == made()
    assert encode_manifest(decode_manifest(encoded)) == encoded
    assert len(manifest_digest(encoded)) == 64


EMBED, ENTRY, HEAD = made().tensors
SPANS = made().layers


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (replace(made(), format=3), "format 3 is not supported: deploy the function again"),
        (replace(headerless(), tensors=(ENTRY, EMBED)), "'embed' does not follow"),
        (replace(headerless(), tensors=(replace(HEAD, offset=263),)), f"end at byte {NBYTES + 1}"),
        (replace(made(), sha256="../x"), "sha256"),
        (replace(made(), sha256="AB" * 32), "sha256"),
        (replace(made(), nbytes=-1), "nbytes"),
        (replace(made(), nbytes=1 << 80), "nbytes"),
        (replace(made(), units=b"\0" * 16), "16 bytes of unit checksums, 2 units need 32"),
        (replace(made(), tensors=(replace(ENTRY, dtype="Q4"),)), "unknown dtype"),
        (replace(made(), tensors=(replace(ENTRY, offset=0),)), "no header"),
        (replace(made(), tensors=(replace(ENTRY, offset=-256),)), "no header"),
        (replace(made(), tensors=(EMBED, replace(EMBED, name="other"))), "'other' does not follow"),
        (replace(made(), tensors=(EMBED, HEAD)), "'head' does not follow"),
        (replace(made(), tensors=(EMBED, ENTRY)), f"end at byte 262, the image at {NBYTES}"),
        (replace(made(), tensors=(ENTRY, replace(ENTRY, offset=512))), "twice"),
        (replace(made(), tensors=(replace(ENTRY, nbytes=8),)), "does not match"),
        (replace(made(), tensors=(replace(ENTRY, shape=(-3, -1)),)), "bad shape"),
        (replace(made(), tensors=(replace(ENTRY, offset=1 << 30),)), "end at byte 1073741830"),
        (replace(made(), layers=SPANS[:2]), "do not cover"),
        (replace(made(), layers=(SPANS[0], SPANS[2])), "contiguous"),
        (replace(made(), layers=(replace(SPANS[0], kind="magic"), *SPANS[1:])), "kind"),
        (replace(made(), layers=(replace(SPANS[0], index=-1), *SPANS[1:])), "index"),
        (replace(made(), num_layers=7), "num_layers is 7, there are 1"),
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


@settings(max_examples=200)
@given(data=st.data(), value=JSON)
def test_any_value_anywhere_decodes_or_is_refused(data: st.DataObject, value: object) -> None:
    tree = json.loads(encode_manifest(made()))
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
    assert check_units(made(), 0, memoryview(whole)) == []
    whole[UNIT_BYTES + 5] ^= 1
    assert check_units(made(), 0, memoryview(whole)) == [1]
    assert check_units(made(), 0, memoryview(whole)[:UNIT_BYTES]) == []
    assert check_units(made(), UNIT_BYTES, memoryview(whole)[UNIT_BYTES:]) == [1]
    assert check_units(made(), 0, memoryview(b"")) == []


@pytest.mark.parametrize(
    ("offset", "nbytes"), [(1, UNIT_BYTES), (0, 100), (UNIT_BYTES, UNIT_BYTES), (-UNIT_BYTES, 0)]
)
def test_check_units_takes_whole_units_only(offset: int, nbytes: int) -> None:
    with pytest.raises(ValueError, match="unit"):
        check_units(made(), offset, memoryview(bytes(nbytes)))
