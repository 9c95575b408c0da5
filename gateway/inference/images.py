"""Images in requests: from what a client sends to the array that a model takes."""

import asyncio
import importlib
from collections.abc import Mapping

from gateway.errors import BadRequest
from registry.messages import Array


async def pixels(image: str | bytes | list[object], config: Mapping[str, object]) -> Array:
    """The image (gateway/preprocess.py says what it may be) as [1, 3, height, width]. Raises BadRequest."""
    return await asyncio.to_thread(_preprocess, image, config)


def _preprocess(image: str | bytes | list[object], config: Mapping[str, object]) -> Array:
    # Pillow and numpy cost a quarter of a second of a gateway's start, and few gateways see an image.
    module = importlib.import_module("gateway.preprocess")
    try:
        array = module.preprocess(image, config)
    except module.BadImage as error:
        raise BadRequest(f"the image cannot be used: {error}", param="image") from None
    return Array(dtype="float32", shape=(1, *array.shape), data=array.astype("<f4", copy=False).tobytes())
