"""Images and engines for the engine tests: a packed checkpoint in an anonymous region."""

import ctypes
import functools
import json
import mmap
import tempfile
from pathlib import Path

import torch
from transformers import PreTrainedModel

from invoker.engine.contract import ModelSpec, NewSequence
from invoker.engine.decoder import DecoderEngine
from invoker.engine.paths import LayerPath
from registry.images.pack import hash_image, plan_checkpoint
from registry.messages import Sampling
from tests.checkpoints import DECODERS, write_checkpoint

KV_BYTES = 2 << 20
KINDS_AND_PATHS = [
    (kind, path)
    for kind in DECODERS
    for path in (LayerPath.FUSED, LayerPath.HUGGING_FACE)
    # An image of qwen2-tied has padding between its biases.
    if path is LayerPath.HUGGING_FACE or kind not in ("gpt2", "qwen2-tied")
]


class MemoryRegion:
    """A DeviceRegion of anonymous memory."""

    def __init__(self, nbytes: int) -> None:
        self._map = mmap.mmap(-1, max(1, nbytes))
        self.nbytes = nbytes
        self.device = "cpu"
        self.buffer: memoryview = memoryview(self._map)
        self.pointer = ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    def copy(self) -> "MemoryRegion":
        other = MemoryRegion(self.nbytes)
        other.buffer[:] = self.buffer
        return other

    def close(self) -> None:
        """Unmap; raises BufferError while somebody still holds a view."""
        self.buffer.release()
        self._map.close()


def load_image(folder: Path, *, dtype: str = "float32") -> tuple[ModelSpec, MemoryRegion]:
    """Pack a checkpoint folder into a region."""
    plan = plan_checkpoint(folder, dtype)
    region = MemoryRegion(plan.nbytes)
    plan.read_into(0, region.buffer)
    config = json.loads((folder / "config.json").read_text())
    spec = ModelSpec(manifest=hash_image(plan), config=config, dtype=dtype, context_length=512)
    return spec, region


@functools.cache
def cached_image(
    kind: str, dtype: str = "float32", sharded: bool = False
) -> tuple[ModelSpec, MemoryRegion, PreTrainedModel]:
    """An image of one of checkpoints.DECODERS and its model, made once; copy the region to change it."""
    with tempfile.TemporaryDirectory() as folder:
        model = write_checkpoint(kind, Path(folder), dtype=getattr(torch, dtype), sharded=sharded)
        spec, region = load_image(Path(folder), dtype=dtype)
    return spec, region, model


def make_decoder(
    kind: str,
    dtype: str = "float32",
    kv: int = KV_BYTES,
    path: LayerPath = LayerPath.AUTO,
    **limits: int,
) -> DecoderEngine:
    """An engine for one of checkpoints.DECODERS, by default with little prefill a step."""
    spec, region, _ = cached_image(kind, dtype)
    return DecoderEngine(spec, region, kv, path=path, **{"max_sequences": 8, "prefill_budget": 24, **limits})


def sequence(
    request_id: str,
    prompt: list[int],
    generated: list[int] | None = None,
    **sampling: object,
) -> NewSequence:
    """A sequence, greedy and 32 tokens long unless told otherwise."""
    settings = {"max_tokens": 32, "temperature": 0.0, **sampling}
    return NewSequence(
        request_id=request_id,
        prompt_ids=prompt,
        generated_ids=generated or [],
        sampling=Sampling(**settings),  # type: ignore[arg-type]
    )


def run_all(engine: DecoderEngine, sequences: list[NewSequence], at_once: int = 8) -> dict[str, list[int]]:
    """Generate all sequences with at most `at_once` in flight; the tokens by request."""
    left = list(reversed(sequences))
    tokens: dict[str, list[int]] = {s.request_id: [] for s in sequences}
    while left or engine.has_work:
        while left and engine.sequences < at_once:
            engine.add(left.pop())
        for output in engine.step():
            assert not output.error, output.error
            if output.token_id is not None:
                tokens[output.request_id].append(output.token_id)
        engine.check_integrity()
    return tokens
