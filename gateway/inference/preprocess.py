"""Preprocessing of an image for a vision model, as in its preprocessor_config.json.

An image is one of
- the bytes of a PNG, JPEG, WEBP, GIF (its first frame) or BMP file;
- such a file as base64 text or as a data URL;
- a nested list of integers 0 to 255, `[height][width][3]` or `[3][height][width]`;
- a nested list `[3][height][width]` with fractions: the model's input, used as it is.

The steps are those of the ViT, DeiT, ConvNeXT (which ResNet uses), BiT and CLIP processors: to RGB, resize,
centre crop, rescale, normalise.
"""

import base64
import binascii
import io
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from PIL import Image, UnidentifiedImageError

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
MAX_FILE_BYTES = 32 << 20
MAX_PIXELS = 50_000_000  # of a picture, before and after resizing

_DATA_URL = re.compile(r"data:(?P<type>[\w.+-]+/[\w.+-]+)?(?P<parameters>(;[\w=.+-]+)*),", re.IGNORECASE)
_TYPE_SUFFIXES = re.compile(r"(FeatureExtractor|ImageProcessor(Fast|Pil)?)$")

_HALF = (0.5, 0.5, 0.5)
_CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
_CLIP_STD = (0.26862954, 0.26130258, 0.27577711)


class BadImage(ValueError):
    """The image, or the function's preprocessor_config.json, cannot be used; the message has the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Either exactly `height` x `width`, or the shorter edge `shortest` with the aspect ratio kept."""

    height: int = 0
    width: int = 0
    shortest: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageProcessor:
    """A parsed preprocessor_config.json. `crop_share` is ConvNeXT's: resize larger, then crop to size."""

    size: Size | None = None
    resample: int = Image.Resampling.BILINEAR
    crop: tuple[int, int] | None = None
    rescale: float | None = 1 / 255
    mean: tuple[float, ...] | None = _HALF
    std: tuple[float, ...] | None = _HALF
    crop_share: float | None = None


# The processors' defaults of settings that a file lacks.
_DEFAULTS: Mapping[str, ImageProcessor] = {
    "ViT": ImageProcessor(size=Size(height=224, width=224)),
    "DeiT": ImageProcessor(size=Size(height=256, width=256), resample=3, crop=(224, 224)),
    "ConvNext": ImageProcessor(size=Size(shortest=384), resample=3, crop_share=224 / 256),
    "CLIP": ImageProcessor(
        size=Size(shortest=224), resample=3, crop=(224, 224), mean=_CLIP_MEAN, std=_CLIP_STD
    ),
    "Bit": ImageProcessor(
        size=Size(shortest=224), resample=3, crop=(224, 224), mean=_CLIP_MEAN, std=_CLIP_STD
    ),
}


def preprocess(image: bytes | str | Sequence[object], config: Mapping[str, object]) -> np.ndarray:
    """Return the model's input, a float32 array [3, height, width]. Raises BadImage."""
    if isinstance(image, bytes | bytearray | memoryview):
        return process(open_picture(bytes(image)), parse_processor(config))
    if isinstance(image, str):
        return process(open_picture(decode_text(image)), parse_processor(config))
    array = nested_array(image)
    if array.dtype == np.float32:
        return array
    return process(Image.fromarray(array), parse_processor(config))


def decode_text(text: str) -> bytes:
    """Return the file in a base64 text or a data URL. Raises BadImage."""
    if text[:5].lower() == "data:":
        match = _DATA_URL.match(text)
        if match is None or "base64" not in match["parameters"].lower().split(";"):
            raise BadImage("a data URL must look like data:image/png;base64,…")
        text = text[match.end() :]
    if len(text) > MAX_FILE_BYTES * 4 // 3 + 4096:
        raise BadImage(f"the image is over {MAX_FILE_BYTES} bytes")
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError):
        raise BadImage("the text is neither base64 nor a data URL") from None


def open_picture(data: bytes) -> Image.Image:
    """Return the decoded picture in RGB. Raises BadImage for other formats, damaged or too large files."""
    if len(data) > MAX_FILE_BYTES:
        raise BadImage(f"the image is over {MAX_FILE_BYTES} bytes")
    if not data:
        raise BadImage("the image is empty")
    too_large = f"the picture has over {MAX_PIXELS} pixels"
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as picture:
            # Only the header is read yet: a small file may declare a huge picture.
            if picture.width * picture.height > MAX_PIXELS:
                raise BadImage(too_large)
            return picture.convert("RGB")
    except UnidentifiedImageError:
        raise BadImage(f"not a picture in one of the formats {', '.join(FORMATS)}") from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise BadImage(too_large) from None
    except BadImage:
        raise
    except (OSError, SyntaxError, ValueError, EOFError, OverflowError, MemoryError) as error:
        # Pillow's decoders raise all of these for files that are cut short or damaged.
        raise BadImage(f"the picture is damaged: {error}") from None


def nested_array(nested: Sequence[object]) -> np.ndarray:
    """Return a uint8 picture [height, width, 3], or the model's float32 input [3, height, width].

    Raises BadImage.
    """
    try:
        array = np.array(nested)
    except (ValueError, OverflowError, RecursionError):
        raise BadImage("the image's rows differ in length") from None
    if array.ndim != 3 or array.dtype.kind not in "iuf" or 0 in array.shape:
        raise BadImage("a nested image must be numbers, [height][width][3] or [3][height][width]")
    if array.size > 3 * MAX_PIXELS:
        raise BadImage(f"the picture has over {MAX_PIXELS} pixels")
    if array.dtype.kind == "f":
        if array.shape[0] != 3:
            raise BadImage("an image with fractions is the model's input and must be [3][height][width]")
        values = array.astype(np.float32)
        if not np.isfinite(values).all():
            raise BadImage("the image has values that are not finite")
        return values
    if array.shape[2] != 3:
        if array.shape[0] != 3:
            raise BadImage("a nested image must be [height][width][3] or [3][height][width]")
        array = np.moveaxis(array, 0, -1)
    if array.min() < 0 or array.max() > 255:
        raise BadImage("an image of integers must have values of 0 to 255")
    return np.ascontiguousarray(array, dtype=np.uint8)


def process(picture: Image.Image, processor: ImageProcessor) -> np.ndarray:
    """Resize, crop, rescale and normalise a picture in RGB."""
    if processor.size is not None:
        picture = _resize(picture, processor.size, processor)
    pixels = np.moveaxis(np.asarray(picture), -1, 0)
    if processor.crop is not None:
        pixels = _centre_crop(pixels, processor.crop)
    values = pixels.astype(np.float32)
    if processor.rescale is not None:
        values = (pixels * processor.rescale).astype(np.float32)
    if processor.mean is not None and processor.std is not None:
        values -= np.array(processor.mean, dtype=np.float32)[:, None, None]
        values /= np.array(processor.std, dtype=np.float32)[:, None, None]
    return np.ascontiguousarray(values)


def parse_processor(config: Mapping[str, object]) -> ImageProcessor:
    """Parse a preprocessor_config.json. Raises BadImage naming the key that is wrong."""
    if not config:
        raise BadImage(
            "the function has no preprocessor_config.json: deploy the model with one, "
            "or send the model's input as [3][height][width] with fractions"
        )
    kind = config.get("image_processor_type") or config.get("feature_extractor_type") or ""
    family = _TYPE_SUFFIXES.sub("", kind if isinstance(kind, str) else "")
    processor = _DEFAULTS.get(family, ImageProcessor())
    # A plain number is a square for ViT and DeiT, the shorter edge for the others.
    square = family not in ("CLIP", "ConvNext", "Bit")
    if (given := config.get("size")) is not None:
        processor = replace(processor, size=_size(given, "size", square=square))
    if (given := config.get("resample")) is not None:
        processor = replace(processor, resample=_resample(given))
    if (given := config.get("crop_size")) is not None:
        processor = replace(processor, crop=_crop(given))
    if (given := config.get("rescale_factor")) is not None:
        processor = replace(processor, rescale=_number(given, "rescale_factor"))
    if (given := config.get("crop_pct")) is not None and family == "ConvNext":
        share = _number(given, "crop_pct")
        if not 0.01 <= share <= 1:
            raise BadImage(f"preprocessor_config.json: crop_pct must be 0.01 to 1, not {share}")
        processor = replace(processor, crop_share=share)
    if (given := config.get("image_mean")) is not None:
        processor = replace(processor, mean=_channels(given, "image_mean"))
    if (given := config.get("image_std")) is not None:
        processor = replace(processor, std=_channels(given, "image_std"))
        if 0 in (processor.std or ()):
            raise BadImage("preprocessor_config.json: image_std must not be 0")
    return _without_disabled_steps(processor, config, family)


def _without_disabled_steps(
    processor: ImageProcessor, config: Mapping[str, object], family: str
) -> ImageProcessor:
    if not config.get("do_resize", True):
        processor = replace(processor, size=None)
    elif processor.size is None:
        raise BadImage("preprocessor_config.json: size is missing")
    if not config.get("do_center_crop", family in ("DeiT", "CLIP", "Bit")):
        processor = replace(processor, crop=None)
    elif processor.crop is None:
        raise BadImage("preprocessor_config.json: crop_size is missing")
    if not config.get("do_rescale", True):
        processor = replace(processor, rescale=None)
    if not config.get("do_normalize", True):
        processor = replace(processor, mean=None, std=None)
    return processor


def _resize(picture: Image.Image, size: Size, processor: ImageProcessor) -> Image.Image:
    share = processor.crop_share
    if share is None:
        return _resize_to(picture, _target(picture, size), processor.resample)
    if not size.shortest:
        raise BadImage("preprocessor_config.json: size needs shortest_edge for a ConvNeXT processor")
    edge = size.shortest
    if edge >= 384:
        # ConvNeXT warps instead of cropping from this size on.
        return _resize_to(picture, (edge, edge), processor.resample)
    larger = _resize_to(picture, _target(picture, Size(shortest=int(edge / share))), processor.resample)
    pixels = _centre_crop(np.moveaxis(np.asarray(larger), -1, 0), (edge, edge))
    return Image.fromarray(np.ascontiguousarray(np.moveaxis(pixels, 0, -1)))


def _target(picture: Image.Image, size: Size) -> tuple[int, int]:
    """Return the (height, width) to resize to."""
    if not size.shortest:
        return size.height, size.width
    short, long = sorted((picture.width, picture.height))
    scaled = int(size.shortest * long / short)
    return (scaled, size.shortest) if picture.width <= picture.height else (size.shortest, scaled)


def _resize_to(picture: Image.Image, target: tuple[int, int], resample: int) -> Image.Image:
    height, width = target
    if height * width > MAX_PIXELS:
        raise BadImage(f"the picture is too narrow: resized it would have over {MAX_PIXELS} pixels")
    return picture.resize((width, height), resample=Image.Resampling(resample))


def _centre_crop(pixels: np.ndarray, crop: tuple[int, int]) -> np.ndarray:
    """Return the centre of [channels, height, width], with a black margin if the picture is smaller."""
    height, width = crop
    _, old_height, old_width = pixels.shape
    if height > old_height or width > old_width:
        new_height, new_width = max(height, old_height), max(width, old_width)
        canvas = np.zeros((pixels.shape[0], new_height, new_width), dtype=pixels.dtype)
        top = math.ceil((new_height - old_height) / 2)
        left = math.ceil((new_width - old_width) / 2)
        canvas[:, top : top + old_height, left : left + old_width] = pixels
        # Counted from the old picture's corner, to round an odd margin as the processors do.
        first_row = (old_height - height) // 2 + top
        first_column = (old_width - width) // 2 + left
        return canvas[:, first_row : first_row + height, first_column : first_column + width]
    top, left = (old_height - height) // 2, (old_width - width) // 2
    return pixels[:, top : top + height, left : left + width]


def _size(value: object, key: str, *, square: bool) -> Size:
    if isinstance(value, int | float) and not isinstance(value, bool):
        edge = _edge(value, key)
        return Size(height=edge, width=edge) if square else Size(shortest=edge)
    if isinstance(value, list) and len(value) == 2:
        return Size(height=_edge(value[0], key), width=_edge(value[1], key))
    if isinstance(value, dict):
        if "shortest_edge" in value and value.get("longest_edge") is None:
            return Size(shortest=_edge(value["shortest_edge"], f"{key}.shortest_edge"))
        if "height" in value and "width" in value:
            return Size(
                height=_edge(value["height"], f"{key}.height"), width=_edge(value["width"], f"{key}.width")
            )
    raise BadImage(f"preprocessor_config.json: {key} must have height and width, or shortest_edge alone")


def _crop(value: object) -> tuple[int, int]:
    size = _size(value, "crop_size", square=True)
    return (size.shortest, size.shortest) if size.shortest else (size.height, size.width)


def _edge(value: object, key: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 1 <= value <= 8192:
        raise BadImage(f"preprocessor_config.json: {key} must be 1 to 8192, not {value!r}")
    return int(value)


def _resample(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= 5:
        raise BadImage(f"preprocessor_config.json: resample must be 0 to 5, not {value!r}")
    return value


def _number(value: object, key: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise BadImage(f"preprocessor_config.json: {key} must be a number, not {value!r}")
    return float(value)


def _channels(value: object, key: str) -> tuple[float, ...]:
    if isinstance(value, list) and len(value) == 3:
        return tuple(_number(item, key) for item in value)
    if isinstance(value, int | float):
        return (_number(value, key),) * 3
    raise BadImage(f"preprocessor_config.json: {key} must be three numbers")
