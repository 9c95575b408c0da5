"""The image of an emulated model: incompressible bytes, the same wherever they are generated."""

import json
import zlib

import numpy as np

from invoker.emulated.profiles import H800 as ANY_GPU
from invoker.emulated.profiles import HEADER_BYTES, LinkRates, Profile, find_model
from registry.config.emulation import EmulatedModel
from registry.images.layout import Layout, encode_header
from registry.images.manifest import LayerSpan, TensorEntry

_PIECE_BYTES = 1 << 20  # generated at once, each from its own seed


class EmulatedPlan:
    """An ImagePlan of a model, at its scale. One tensor stands for all tensors of a step of execution.

    The bytes of the tensors are random and do not compress.
    """

    model_type = "emulated"
    dtype = "bfloat16"
    tied_head = False

    def __init__(self, model: EmulatedModel) -> None:
        """Look the model's profile up. Raises UnknownProfile."""
        decoder = find_model(model)
        profile = Profile(model=decoder, gpu=ANY_GPU, gpus=1, links=LinkRates(), scale=model.scale)
        self.architecture = str(model)
        self.num_layers = decoder.layers
        self.context_length = decoder.context
        self.layout = Layout(
            tensors=tuple(_tensor(span) for span in profile.spans),
            layers=profile.spans,
            nbytes=profile.image_bytes,
        )
        self.config: dict[str, object] = {
            "model_type": self.model_type,
            "emulated": self.architecture,
            "vocab_size": decoder.vocabulary,
            "num_hidden_layers": decoder.layers,
            "hidden_size": decoder.hidden,
            "max_position_embeddings": decoder.context,
            "eos_token_id": 2,
        }
        self._header = encode_header(self.layout.tensors, HEADER_BYTES)
        assert len(self._header) == HEADER_BYTES
        self._seed = zlib.crc32(self.architecture.encode())

    def __repr__(self) -> str:
        return f"<EmulatedPlan {self.architecture}, {self.nbytes} bytes>"

    @property
    def nbytes(self) -> int:
        return self.layout.nbytes

    @property
    def assets(self) -> dict[str, bytes]:
        """The assets of the model: no tokenizer, so that calls send and receive token ids."""
        return {"config.json": json.dumps(self.config, indent=2).encode()}

    def read_into(self, offset: int, into: memoryview) -> None:
        """Fill `into` with `[offset, offset + len(into))` of the image."""
        end = offset + len(into)
        if not 0 <= offset <= end <= self.nbytes:
            raise ValueError(f"[{offset}, {end}) is not within the image's {self.nbytes} bytes")
        head = self._header[offset:end]
        into[: len(head)] = head
        into, offset = into[len(head) :], offset + len(head)
        while offset < end:
            piece, skipped = divmod(offset, _PIECE_BYTES)
            made = self._piece(piece)[skipped : skipped + end - offset]
            into[: len(made)] = made
            into = into[len(made) :]
            offset += len(made)

    def _piece(self, index: int) -> memoryview:
        return memoryview(np.random.Generator(np.random.SFC64([self._seed, index])).bytes(_PIECE_BYTES))


def _tensor(span: LayerSpan) -> TensorEntry:
    name = f"layers.{span.index}" if span.kind == "layer" else span.kind
    start = max(span.start, HEADER_BYTES)
    nbytes = span.end - start
    return TensorEntry(name=name, dtype="U8", shape=(nbytes,), offset=start, nbytes=nbytes)
