"""What a deploy sends: its body, and a manifest of its image."""

import hashlib

from registry.images.codec import encode_manifest
from registry.images.manifest import UNIT_BYTES, LayerSpan, Manifest, TensorEntry
from registry.images.verify import CHECKSUM_BYTES
from tests.gateway_http_fixture import Gateway


def manifest_of(image: bytes, architecture: str = "LlamaForCausalLM") -> bytes:
    units = -(-len(image) // UNIT_BYTES)
    return encode_manifest(
        Manifest(
            format=1,
            architecture=architecture,
            model_type="llama",
            tied_head=False,
            num_layers=1,
            nbytes=len(image),
            sha256=hashlib.sha256(image).hexdigest(),
            tensors=(
                TensorEntry(name="w", dtype="F32", shape=(len(image) // 4,), offset=0, nbytes=len(image)),
            ),
            layers=(LayerSpan(kind="layer", index=0, tower="", start=0, end=len(image)),),
            units=b"\0" * (CHECKSUM_BYTES * units),
        )
    )


def draft(gw: Gateway, image: bytes, /, **changes: object) -> dict[str, object]:
    """A deploy's body, its blobs in the store."""
    return {
        "name": "tiny",
        "task": "generate",
        "architecture": "LlamaForCausalLM",
        "image": gw.blobs.put(image),
        "manifest": gw.blobs.put(manifest_of(image)),
        "assets": {"config.json": gw.blobs.put(b"{}")},
        "dtype": "float32",
        "context_length": 64,
        "scaling": {"keep_alive_s": 5},
        **changes,
    }
