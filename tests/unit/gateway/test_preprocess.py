"""Images in: the same arrays as transformers' own processors, and clear errors for everything else."""

import base64
import io
import struct
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.convnext.image_processing_pil_convnext import ConvNextImageProcessorPil
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

from gateway.inference import preprocess as module
from gateway.inference.preprocess import (
    BadImage,
    decode_text,
    nested_array,
    open_picture,
    parse_processor,
    preprocess,
)

IMAGENET = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}

PROCESSORS: Mapping[str, tuple[Any, dict[str, object]]] = {
    "vit": (ViTImageProcessorPil, {"image_processor_type": "ViTImageProcessor"}),
    "vit-small": (
        ViTImageProcessorPil,
        {
            "image_processor_type": "ViTFeatureExtractor",
            "size": {"height": 32, "width": 48},
            "resample": 3,
            **IMAGENET,
        },
    ),
    "vit-no-resize": (
        ViTImageProcessorPil,
        {"image_processor_type": "ViTImageProcessorFast", "do_resize": False},
    ),
    "vit-raw": (
        ViTImageProcessorPil,
        {"image_processor_type": "ViTImageProcessor", "do_normalize": False, "do_rescale": False},
    ),
    "resnet": (
        ConvNextImageProcessorPil,
        {
            "image_processor_type": "ConvNextImageProcessor",
            "size": {"shortest_edge": 64},
            "crop_pct": 0.875,
            **IMAGENET,
        },
    ),
    "resnet-384": (
        ConvNextImageProcessorPil,
        {"feature_extractor_type": "ConvNextFeatureExtractor", "size": {"shortest_edge": 384}, "resample": 2},
    ),
    "clip": (CLIPImageProcessorPil, {"image_processor_type": "CLIPImageProcessor"}),
    "clip-crop-larger": (
        CLIPImageProcessorPil,
        {
            "image_processor_type": "CLIPImageProcessor",
            "size": {"shortest_edge": 31},
            "crop_size": {"height": 40, "width": 35},
        },
    ),
}


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """Return a smooth picture with some noise, so that resampling filters differ."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[0:height, 0:width]
    base = np.stack([128 + 100 * np.sin(x / 7), 128 + 100 * np.cos(y / 5), (x + 2 * y) % 256], axis=-1)
    return Image.fromarray(np.clip(base + rng.normal(0, 10, base.shape), 0, 255).astype(np.uint8))


def encoded(image: Image.Image, format: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format=format, **options)
    return buffer.getvalue()


@pytest.mark.parametrize("name", PROCESSORS)
@pytest.mark.parametrize("size", [(300, 200), (50, 77), (224, 224), (3, 500)])
def test_arrays_equal_transformers(name: str, size: tuple[int, int]) -> None:
    kind, config = PROCESSORS[name]
    image = picture(*size)
    options = {key: value for key, value in config.items() if not key.endswith("_type")}
    expected = kind(**options)(image, return_tensors="np")["pixel_values"][0]
    found = preprocess(encoded(image), config)
    assert found.dtype == np.float32 and found.flags.c_contiguous
    np.testing.assert_allclose(found, expected, atol=1e-5)


@settings(max_examples=25)
@given(
    width=st.integers(1, 90),
    height=st.integers(1, 90),
    crop_height=st.integers(1, 60),
    crop_width=st.integers(1, 60),
)
def test_centre_crop_equals_transformers(width: int, height: int, crop_height: int, crop_width: int) -> None:
    config = {
        "do_resize": False,
        "do_center_crop": True,
        "crop_size": {"height": crop_height, "width": crop_width},
    }
    image = picture(width, height)
    expected = CLIPImageProcessorPil(**config)(image, return_tensors="np")["pixel_values"][0]
    found = preprocess(encoded(image), {"image_processor_type": "CLIPImageProcessor", **config})
    np.testing.assert_allclose(found, expected, atol=1e-5)


VIT = {"image_processor_type": "ViTImageProcessor", "size": {"height": 8, "width": 8}}


def test_all_forms_of_one_picture_give_one_array() -> None:
    image = picture(20, 12)
    data = encoded(image)
    expected = preprocess(data, VIT)
    text = base64.b64encode(data).decode()
    pixels = np.asarray(image)
    forms: list[bytes | str | list[object]] = [
        text,
        "\n".join(text[i : i + 76] for i in range(0, len(text), 76)),
        f"data:image/png;base64,{text}",
        f"DATA:;charset=utf-8;base64,{text}",
        pixels.tolist(),
        np.moveaxis(pixels, -1, 0).tolist(),
        encoded(image, "BMP"),
        encoded(image, "WEBP", lossless=True),
    ]
    for form in forms:
        np.testing.assert_array_equal(preprocess(form, VIT), expected)


def test_fractions_are_ready_for_the_model() -> None:
    values = np.random.default_rng(0).normal(size=(3, 8, 6))
    found = preprocess(values.tolist(), {})
    np.testing.assert_array_equal(found, values.astype(np.float32))


@pytest.mark.parametrize("mode", ["L", "RGBA", "P", "1", "LA", "CMYK"])
def test_every_colour_mode_becomes_rgb(mode: str) -> None:
    image = picture(10, 9).convert(mode)
    data = encoded(image, "JPEG" if mode == "CMYK" else "PNG")
    assert open_picture(data).mode == "RGB"
    assert preprocess(data, VIT).shape == (3, 8, 8)


def test_an_animation_gives_its_first_frame() -> None:
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue")]
    data = encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert open_picture(data).getpixel((0, 0)) == (255, 0, 0)


def png_header(width: int, height: int) -> bytes:
    """Return a few bytes that claim to be a picture of that size."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(b"0"))
        + chunk(b"IEND", b"")
    )


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (b"", "empty"),
        (b"not an image", "not a picture"),
        (b"%PDF-1.4 ...", "not a picture"),
        (encoded(picture(9, 9), "TIFF"), "not a picture"),
        (encoded(picture(64, 64))[:200], "damaged"),
        (encoded(picture(64, 64), "JPEG")[:400], "damaged"),
        (png_header(9000, 9000), "over 50000000 pixels"),
        (png_header(12000, 12000), "over 50000000 pixels"),
        (png_header(60000, 60000), "over 50000000 pixels"),
        ("data:image/png,abc", "data URL"),
        ("data:nonsense", "data URL"),
        ("@@@@", "neither base64"),
        ("aGVsbG8=", "not a picture"),
        ([], "must be numbers"),
        ([1, 2], "must be numbers"),
        ([[[1, 2, 3], [4, 5]]], "differ in length"),
        ([[["a", "b", "c"]]], "must be numbers"),
        ([[[True, True, False]]], "must be numbers"),
        ([[[1, 2, 256]]], "0 to 255"),
        ([[[-1, 2, 3]]], "0 to 255"),
        ([[[1, 2], [3, 4]]], r"\[height\]\[width\]\[3\]"),
        ([[[0.1, 0.2, 0.3]]], "the model.s input"),
        ([[[float("nan")]], [[0.0]], [[0.0]]], "finite"),
        ([[[10**30]], [[1]], [[1]]], "must be numbers"),
    ],
)
def test_bad_images_are_refused(image: Any, message: str) -> None:
    with pytest.raises(BadImage, match=message):
        preprocess(image, VIT)


def test_a_narrow_picture_cannot_grow_without_bound() -> None:
    config = {"image_processor_type": "CLIPImageProcessor"}
    with pytest.raises(BadImage, match="too narrow"):
        preprocess(encoded(Image.new("RGB", (1, 60_000))), {**config, "size": {"shortest_edge": 2000}})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "no preprocessor_config.json"),
        ({"image_processor_type": "Unknown"}, "size is missing"),
        ({**VIT, "size": {"longest_edge": 5}}, "size must have"),
        ({**VIT, "size": {"height": 0, "width": 5}}, "size.height"),
        ({**VIT, "size": 1e9}, "size must be"),
        ({**VIT, "resample": 9}, "resample"),
        ({**VIT, "image_mean": [1, 2]}, "image_mean"),
        ({**VIT, "image_std": [1, 0, 1]}, "image_std"),
        ({**VIT, "rescale_factor": "x"}, "rescale_factor"),
        ({**VIT, "do_center_crop": True}, "crop_size is missing"),
        ({"image_processor_type": "ConvNextImageProcessor", "crop_pct": 0}, "crop_pct"),
    ],
)
def test_bad_configurations_are_refused(config: Any, message: str) -> None:
    with pytest.raises(BadImage, match=message):
        preprocess(encoded(picture(9, 9)), config)


@pytest.mark.parametrize(
    ("kind", "shape"), [("ViTFeatureExtractor", (3, 24, 24)), ("CLIPFeatureExtractor", (3, 24, 48))]
)
def test_a_plain_number_is_a_size_of_old_files(kind: str, shape: tuple[int, ...]) -> None:
    config = {"feature_extractor_type": kind, "size": 24, "do_center_crop": False}
    assert preprocess(encoded(picture(40, 20)), config).shape == shape


def test_parts_are_usable_alone() -> None:
    assert decode_text("aGVsbG8=") == b"hello"
    assert nested_array([[[1, 2, 3]]]).dtype == np.uint8
    assert parse_processor(VIT).size == module.Size(height=8, width=8)
