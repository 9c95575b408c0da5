"""Images in requests: from what a client sends to the array that a model takes."""

import asyncio
import base64
import binascii
import importlib
import re
from collections.abc import Mapping

from gateway.compute import pixels_from_nested
from gateway.errors import BadRequest, Unprocessable
from registry.messages import Array

_DATA_URL = re.compile(r"data:[^;,]*(;[^,]*)?,", re.IGNORECASE)


async def pixels(image: str | bytes | list[object], config: Mapping[str, object]) -> Array:
    """An image file (bytes, base64 or a data URL) preprocessed by `config`, or given pixel values.

    Raises BadRequest for what cannot be decoded, Unprocessable for an array of a wrong shape.
    """
    if isinstance(image, list):
        try:
            return pixels_from_nested(image)
        except ValueError as error:
            raise Unprocessable(str(error), param="image") from None
    data = image if isinstance(image, bytes) else _from_base64(image)
    return await asyncio.to_thread(_preprocess, data, dict(config))


def _from_base64(text: str) -> bytes:
    if found := _DATA_URL.match(text):
        if ";base64" not in found.group().lower():
            raise BadRequest("a data URL must be base64", param="image")
        text = text[found.end() :]
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise BadRequest("the image is neither base64 nor a data URL", param="image") from None


def _preprocess(data: bytes, config: dict[str, object]) -> Array:
    # Pillow and numpy cost a quarter of a second of a gateway's start, and few gateways see an image.
    module = importlib.import_module("gateway.preprocess")
    try:
        array = module.preprocess(data, config)
    except ValueError as error:
        raise BadRequest(f"the image cannot be used: {error}", param="image") from None
    return Array(dtype="float32", shape=(1, *array.shape), data=array.astype("<f4", copy=False).tobytes())
