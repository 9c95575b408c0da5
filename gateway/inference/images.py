"""Images in requests, converted to the array that a model takes."""

import importlib
from collections.abc import Mapping

from gateway.core.errors import BadRequest
from registry.messages.node import Array


def pixels(image: str | bytes | list[object], config: Mapping[str, object]) -> Array:
    """Return the image as float32 [1, 3, height, width] (see `preprocess`). Raises BadRequest.

    It takes long, and up to some 300 MB of memory.
    """
    # Importing Pillow and numpy takes a quarter of a second, and few gateways receive images.
    module = importlib.import_module("gateway.inference.preprocess")
    try:
        array = module.preprocess(image, config)
    except module.BadImage as error:
        raise BadRequest(f"the image cannot be used: {error}", param="image") from None
    return Array(dtype="float32", shape=(1, *array.shape), data=array.astype("<f4", copy=False).tobytes())
