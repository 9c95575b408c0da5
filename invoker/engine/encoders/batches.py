"""Batches of an encoder's inputs: checked, sorted by length, padded, bounded in size."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from invoker.engine.contract import EngineError
from invoker.engine.encoders.towers import EncoderInputs

MAX_BATCH_TOKENS = 8192
MAX_BATCH_PIXELS = 32 * 3 * 224 * 224


class InvalidInput(EngineError):
    """The inputs do not fit the model."""

    code = "bad_request"


@dataclass(frozen=True, slots=True, kw_only=True)
class TextLimits:
    """The limits of a text tower: ids in `[0, vocabulary)`, at most `longest` tokens; and its padding id."""

    vocabulary: int
    longest: int
    padding: int

    @classmethod
    def from_config(cls, architecture: str, config: Any) -> "TextLimits | None":
        """Return the limits from a parsed config; None for a model that reads no text."""
        if architecture == "CLIPModel":
            config = config.text_config
        if not hasattr(config, "vocab_size"):
            return None
        padding = config.pad_token_id if config.pad_token_id is not None else 0
        longest = config.max_position_embeddings
        if architecture == "MPNetModel":
            padding = 1  # fixed in the model
        if architecture in ("RobertaModel", "XLMRobertaModel", "MPNetModel"):
            longest -= padding + 1  # positions start after the padding's own
        # CLIP's configurations name padding ids beyond the vocabulary; a masked id only has to be valid.
        padding = padding if 0 <= padding < config.vocab_size else 0
        return cls(vocabulary=config.vocab_size, longest=longest, padding=padding)


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderBatch:
    """Some of the inputs; `rows` are their indices among all."""

    rows: tuple[int, ...]
    inputs: EncoderInputs


def text_batches(
    token_ids: Sequence[Sequence[int]], limits: TextLimits, device: torch.device
) -> Iterator[EncoderBatch]:
    """Yield padded batches of at most MAX_BATCH_TOKENS, longest first. Raises InvalidInput."""
    _check_text(token_ids, limits)
    order = sorted(range(len(token_ids)), key=lambda row: -len(token_ids[row]))
    while order:
        length = len(token_ids[order[0]])
        count = max(1, MAX_BATCH_TOKENS // length)
        rows, order = order[:count], order[count:]
        ids = np.full((len(rows), length), limits.padding, dtype=np.int64)
        mask = np.zeros((len(rows), length), dtype=np.int64)
        for index, row in enumerate(rows):
            ids[index, : len(token_ids[row])] = token_ids[row]
            mask[index, : len(token_ids[row])] = 1
        inputs = EncoderInputs(
            token_ids=torch.from_numpy(ids).to(device), mask=torch.from_numpy(mask).to(device)
        )
        yield EncoderBatch(rows=tuple(rows), inputs=inputs)


def image_batches(
    pixels: np.ndarray | None, channels: int, size: tuple[int, int] | None, device: torch.device
) -> Iterator[EncoderBatch]:
    """Yield batches of at most MAX_BATCH_PIXELS values; `size` is (height, width), None for any."""
    if pixels is None or pixels.ndim != 4 or 0 in pixels.shape:
        raise InvalidInput("pixels must be an array [n, channels, height, width]")
    if pixels.shape[1] != channels:
        raise InvalidInput(f"pixels have {pixels.shape[1]} channels, the model takes {channels}")
    if size is not None and pixels.shape[2:] != size:
        found = "x".join(map(str, pixels.shape[2:]))
        raise InvalidInput(f"images are {found} pixels, the model takes {size[0]}x{size[1]}")
    values = np.ascontiguousarray(pixels, dtype=np.float32)
    count = max(1, MAX_BATCH_PIXELS // values[0].size)
    for start in range(0, len(values), count):
        part = values[start : start + count]
        # Arrays from the wire are read-only, about which torch would warn.
        tensor = torch.from_numpy(part if part.flags.writeable else part.copy()).to(device)
        rows = tuple(range(start, start + len(part)))
        yield EncoderBatch(rows=rows, inputs=EncoderInputs(pixels=tensor))


def _check_text(token_ids: Sequence[Sequence[int]], limits: TextLimits) -> None:
    if not token_ids:
        raise InvalidInput("no texts: give at least one")
    for row, ids in enumerate(token_ids):
        if not ids:
            raise InvalidInput(f"text {row} has no tokens")
        if len(ids) > limits.longest:
            raise InvalidInput(f"text {row} has {len(ids)} tokens, the model takes at most {limits.longest}")
        if min(ids) < 0 or max(ids) >= limits.vocabulary:
            raise InvalidInput(f"text {row} has a token id outside [0, {limits.vocabulary})")
