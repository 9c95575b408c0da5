"""Ways to damage the header of a safetensors file and a manifest."""

import copy
import json
import random
from collections.abc import Callable
from typing import Any

from tests.images_fixture import frame, llama_config

CASES = 200
SEED = 20
HIDDEN = 96
CONFIG = llama_config(
    hidden_size=HIDDEN,
    intermediate_size=2 * HIDDEN,
    num_attention_heads=4,
    num_key_value_heads=4,
    vocab_size=400,
)
Mutation = Callable[[random.Random, Any], Any]

NUMBERS: tuple[Any, ...] = (
    -1,
    0,
    1,
    7,
    1 << 31,
    (1 << 63) - 1,
    1 << 63,
    1 << 64,
    1 << 200,
    1.5,
    float("nan"),
    float("inf"),
    True,
    None,
    "8",
    [],
    {},
)


def deep(levels: int) -> Any:
    value: Any = 0
    for _ in range(levels):
        value = [value]
    return value


# --- mutations of a safetensors header --------------------------------------------------------------


def entry_of(random_: random.Random, header: Any) -> Any:
    return header[random_.choice(sorted(header))]


def change_dtype(random_: random.Random, header: Any) -> None:
    entry_of(random_, header)["dtype"] = random_.choice(
        ["F16", "I32", "U8", "F8_E4M3", "F64", "F7", "", "f32", None, 4, ["F32"], "F" * 5000, "\ud800"]
    )


def change_shape(random_: random.Random, header: Any) -> None:
    entry = entry_of(random_, header)
    shape = entry["shape"]
    kind = random_.randrange(5)
    if kind == 0:
        shape[random_.randrange(len(shape))] = random_.choice(NUMBERS)
    elif kind == 1:
        shape.append(random_.choice(NUMBERS))
    elif kind == 2 and shape[0] % 2 == 0:
        entry["shape"] = [shape[0] // 2, 2, *shape[1:]]  # as many bytes
    elif kind == 3:
        entry["shape"] = [1 << 32] * 64
    else:
        entry["shape"] = random_.choice([None, "2", {}, 3, deep(100), [1] * 100_000])


def change_offsets(random_: random.Random, header: Any) -> None:
    entry = entry_of(random_, header)
    offsets = entry["data_offsets"]
    kind = random_.randrange(5)
    if kind == 0:
        offsets[random_.randrange(2)] = random_.choice(NUMBERS)
    elif kind == 1:
        offsets.reverse()
    elif kind == 2:
        entry["data_offsets"] = list(entry_of(random_, header)["data_offsets"])
    elif kind == 3:
        shift = random_.choice([-4, 4, 1 << 40])
        entry["data_offsets"] = [offset + shift for offset in offsets]
    else:
        entry["data_offsets"] = random_.choice([None, [], [0], [0, 4, 8], "0,4", {"begin": 0}])


def change_names(random_: random.Random, header: Any) -> None:
    name = random_.choice(sorted(header))
    kind = random_.randrange(4)
    if kind == 0:
        header[name + random_.choice(["x", "\0", "/../../etc", "\u202e"])] = header.pop(name)
    elif kind == 1:
        del header[name]
    elif kind == 2:
        header["extra.weight"] = copy.deepcopy(header[name])
    else:
        header[name] = random_.choice([None, [], "x", 1, {}, {**header[name], "more": 1}])


def change_metadata(random_: random.Random, header: Any) -> None:
    header["__metadata__"] = random_.choice(
        [{"format": "pt"}, {"x": "y" * 100_000}, deep(50), deep(900), 5, None, {"n": 1 << 300}]
    )


def encoded(mutate: Callable[[random.Random, Any], None]) -> Mutation:
    """A mutation of the header's JSON, with its length right."""

    def apply(random_: random.Random, raw: bytes) -> bytes:
        header, data = parted(raw)
        mutate(random_, header)
        return frame(header) + data

    return apply


def parted(raw: bytes) -> tuple[Any, bytes]:
    length = int.from_bytes(raw[:8], "little")
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def flip_bits(random_: random.Random, raw: bytes) -> bytes:
    """In the header or its length: data has no redundancy in this format."""
    changed = bytearray(raw)
    end = 8 + int.from_bytes(raw[:8], "little")
    for _ in range(random_.randint(1, 8)):
        changed[random_.randrange(end)] ^= 1 << random_.randrange(8)
    return bytes(changed)


def truncate(random_: random.Random, raw: bytes) -> bytes:
    return raw[: random_.choice([0, 7, 8, 9, random_.randrange(4000), random_.randrange(len(raw))])]


def extend(random_: random.Random, raw: bytes) -> bytes:
    return raw + bytes(random_.randint(1, 5000))


def change_length(random_: random.Random, raw: bytes) -> bytes:
    length = int.from_bytes(raw[:8], "little")
    huge = [0, 1, length - 1, length + 1, len(raw), len(raw) - 8, 99_999_999, 1 << 40, (1 << 64) - 1]
    return random_.choice(huge).to_bytes(8, "little") + raw[8:]


def other_json(random_: random.Random, raw: bytes) -> bytes:
    """A header that is no object of tensors at all."""
    _, data = parted(raw)
    bombs = [
        b"[" * 200_000,
        b'{"a":' * 100_000,
        b"[" + b"0," * 200_000 + b"0]",
        b"[" + b"[]," * 200_000 + b"[]]",
        b"{" + b'"a":1,' * 100_000 + b'"a":1}',
        b"\xff\xfe{}",
        b'{"a": "\xc3\x28"}',
        b"NaN",
        b"9" * 100_000,
        b"{}",
        b"null",
        b'"' + b"x" * 100_000 + b'"',
        b'{"a": {"dtype": "F32", "shape": [NaN], "data_offsets": [0, Infinity]}}',
        b"\x80\x04\x95cposix\nsystem\n.",
    ]
    header = random_.choice(bombs)
    return len(header).to_bytes(8, "little") + header + data


CHECKPOINT_MUTATIONS: tuple[Mutation, ...] = (
    encoded(change_dtype),
    encoded(change_shape),
    encoded(change_offsets),
    encoded(change_names),
    encoded(change_metadata),
    flip_bits,
    truncate,
    extend,
    change_length,
    other_json,
)


# --- mutations of a manifest ------------------------------------------------------------------------


def change_field(random_: random.Random, manifest: Any) -> None:
    name = random_.choice(sorted(manifest))
    kind = random_.randrange(4)
    if kind == 0:
        del manifest[name]
    elif kind == 1:
        manifest[name] = random_.choice(NUMBERS)
    elif kind == 2:
        manifest["extra"] = deep(random_.choice([3, 900]))
    else:
        manifest[name] = random_.choice(["", "x" * 10_000, "../../x", "ab" * 32, deep(100), [0] * 100])


def change_tensor(random_: random.Random, manifest: Any) -> None:
    tensor = random_.choice(manifest["tensors"])
    name = random_.choice(sorted(tensor))
    kind = random_.randrange(5)
    if kind == 0:
        tensor[name] = random_.choice(NUMBERS)
    elif kind == 1:
        del tensor[name]
    elif kind == 2:
        tensor["shape"] = random_.choice(
            [[-1, -1], [1 << 40] * 3, [1] * 65, [0], [*tensor["shape"][::-1], 1]]
        )
    elif kind == 3:
        tensor["offset"] += random_.choice([1, -256, 256, 1 << 50, -(1 << 50)])
    else:
        tensor["name"] = random_.choice(manifest["tensors"])["name"]


def change_span(random_: random.Random, manifest: Any) -> None:
    span = random_.choice(manifest["layers"])
    name = random_.choice(sorted(span))
    kind = random_.randrange(3)
    if kind == 0:
        span[name] = random_.choice(NUMBERS)
    elif kind == 1:
        manifest["layers"].remove(span)
    else:
        manifest["layers"].append(dict(span))


def change_units(random_: random.Random, manifest: Any) -> None:
    units = manifest["units"]
    place = random_.randrange(len(units))
    manifest["units"] = random_.choice(
        [
            units[:place],
            units + units,
            units[:place] + ("A" if units[place] != "A" else "B") + units[place + 1 :],
            "!" * len(units),
            "",
            "\u00e9",
        ]
    )


def claim(random_: random.Random, manifest: Any) -> None:
    """An image of another size than it is."""
    manifest["nbytes"] = random_.choice([0, 1, manifest["nbytes"] + 1, 1 << 45, 1 << 61, 1 << 62, 1 << 70])
    if random_.random() < 0.5:
        manifest["layers"][-1]["end"] = manifest["nbytes"]


def as_json(mutate: Callable[[random.Random, Any], None]) -> Mutation:
    def apply(random_: random.Random, raw: bytes) -> bytes:
        manifest = json.loads(raw)
        mutate(random_, manifest)
        return json.dumps(manifest).encode()

    return apply


def flip_any(random_: random.Random, raw: bytes) -> bytes:
    changed = bytearray(raw)
    for _ in range(random_.randint(1, 4)):
        changed[random_.randrange(len(changed))] ^= 1 << random_.randrange(8)
    return bytes(changed)


def other_text(random_: random.Random, raw: bytes) -> bytes:
    return random_.choice(
        [
            b"",
            b"null",
            b"[]",
            b"[" * 100_000,
            b'{"tensors":' * 10_000,
            raw[:-1],
            raw + raw,
            b"\xef\xbb\xbf" + raw,
            raw.replace(b":", b":NaN", 1),
            raw.replace(b'"F32"', b'"\xff\xff"', 1),
            b'{"nbytes":' + b"9" * 50_000 + b"}",
        ]
    )


MANIFEST_MUTATIONS: tuple[Mutation, ...] = (
    as_json(change_field),
    as_json(change_tensor),
    as_json(change_span),
    as_json(change_units),
    as_json(claim),
    flip_any,
    truncate,
    other_text,
)
