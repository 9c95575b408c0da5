"""Pipelines for the engine's tests: stages over images of which only their own bytes have arrived."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from invoker.engine.conductor import Conductor, PipelineShape
from invoker.engine.contract import NewSequence
from invoker.engine.image_ranges import bytes_of_layers
from invoker.engine.paths import LayerPath
from invoker.engine.pipeline import LocalPipeline
from invoker.engine.scheduler import Limits
from invoker.engine.stage_contract import Stage
from invoker.engine.stage_engine import StageEngine
from registry.images.manifest import Manifest
from tests.checkpoints import CONTEXT, LAYERS, VOCABULARY
from tests.engine_fixture import KV_BYTES, MemoryRegion, cached_image

LIMITS = Limits(sequences=8, prefill_tokens=24, turn_tokens=16)


def arrived(manifest: Manifest, region: MemoryRegion, first: int, last: int) -> MemoryRegion:
    """A copy of the image in which all but the bytes of these layers are parts of NaNs."""
    copy = MemoryRegion(region.nbytes)
    copy.buffer[:] = b"\xff" * region.nbytes
    for start, end in bytes_of_layers(manifest, first, last):
        copy.buffer[start:end] = region.buffer[start:end]
    return copy


def make_stages(
    kind: str,
    cuts: Sequence[int],
    dtype: str = "float32",
    kv: int = KV_BYTES,
    path: LayerPath = LayerPath.AUTO,
) -> list[StageEngine]:
    """Stages of one of checkpoints.DECODERS, from cut to cut, each over an image of its own."""
    spec, region, _ = cached_image(kind, dtype)
    return [
        StageEngine(
            replace(spec, layers=(first, last)),
            arrived(spec.manifest, region, first, last),
            kv * (last - first) // LAYERS,
            path=path,
        )
        for first, last in pairwise(cuts)
    ]


def pipeline_of(stages: Sequence[Stage], limits: Limits = LIMITS, steps: int | None = None) -> LocalPipeline:
    """A pipeline of stages with the conductor that it needs."""
    shape = PipelineShape(
        stages=len(stages),
        pages=min(stage.pages for stage in stages),
        context=CONTEXT,
        vocabulary=VOCABULARY,
        steps=len(stages) + 1 if steps is None else steps,
    )
    return LocalPipeline(stages, Conductor(shape, limits))


def run_pipeline(
    pipeline: LocalPipeline, sequences: Sequence[NewSequence], at_once: int = 8
) -> dict[str, list[int]]:
    """Generate all sequences with at most `at_once` in flight, until the pipeline is empty; the tokens by
    request."""
    left = list(reversed(sequences))
    tokens: dict[str, list[int]] = {sequence.request_id: [] for sequence in sequences}
    while left or pipeline.has_work:
        while left and pipeline.sequences < at_once:
            pipeline.add(left.pop())
        for output in pipeline.step():
            assert not output.error, output.error
            if output.token_id is not None:
                tokens[output.request_id].append(output.token_id)
        pipeline.conductor.check_integrity()
    return tokens
