"""Images and engines for the engine tests: a packed checkpoint in an anonymous region."""

import ctypes
import json
import mmap
from pathlib import Path

from invoker.engine.contract import ModelSpec, NewSequence
from invoker.engine.decoder import DecoderEngine
from registry.images.pack import hash_image, plan_checkpoint
from registry.messages import Sampling


class MemoryRegion:
    """A DeviceRegion of anonymous memory."""

    def __init__(self, nbytes: int) -> None:
        self._map = mmap.mmap(-1, max(1, nbytes))
        self.nbytes = nbytes
        self.device = "cpu"
        self.buffer: memoryview | None = memoryview(self._map)
        self.pointer = ctypes.addressof(ctypes.c_char.from_buffer(self._map))


def load_image(folder: Path, *, dtype: str = "float32") -> tuple[ModelSpec, MemoryRegion]:
    """Pack a checkpoint folder into a region."""
    plan = plan_checkpoint(folder, dtype)
    region = MemoryRegion(plan.nbytes)
    assert region.buffer is not None
    plan.read_into(0, region.buffer)
    config = json.loads((folder / "config.json").read_text())
    spec = ModelSpec(manifest=hash_image(plan), config=config, dtype=dtype, context_length=512)
    return spec, region


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
