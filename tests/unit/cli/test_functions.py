"""How commands show functions."""

import msgspec

from cli.commands.functions import PIPELINE_COLUMNS, pipeline
from registry.records.live import LivePipeline, LiveStage


def test_a_pipeline_is_a_row() -> None:
    stages = (
        LiveStage(node="n0", instance_id="i0", first=0, last=3),
        LiveStage(node="n1", instance_id="i1", first=3, last=6),
    )
    one = LivePipeline(pipeline_id="p", epoch=1, stages=stages, head=1, rate=1.7423, slots=13)
    row = pipeline(msgspec.to_builtins(one))
    assert tuple(row) == tuple(column.field for column in PIPELINE_COLUMNS)
    assert tuple(row.values()) == ("p.1", "n0[0,3) n1[3,6)", "n1", 1.74, 0)
