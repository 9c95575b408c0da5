"""Nodes that load in one block order, each of which takes calls while it does."""

from itertools import count

from gateway.live.group import ClosePipeline, StartPipeline
from gateway.live.pairs import PairAction, PairGroup
from registry.records.live import LivePipeline, LiveStage


class Scene:
    """A group of a model with eight layers."""

    def __init__(self, *nodes: str) -> None:
        numbers = count()
        self.group = PairGroup(8, 6, lambda: f"p{next(numbers)}", alone=True)
        for node in nodes:
            assert self.group.add(node, f"i-{node}", 0) == ()

    def room(self, has_room: bool) -> tuple[PairAction, ...]:
        """Report whether the only ready instance has a free slot."""
        return self.group.set_ready({"i-ready": "ready"}, has_room=has_room)

    def holds(self, node: str, layers: int) -> tuple[object, ...]:
        return self.group.on_layers(node, f"i-{node}", (1 << layers) - 1)


def lone(pipeline_id: str, node: str) -> LivePipeline:
    stage = LiveStage(node=node, instance_id=f"i-{node}", first=0, last=8)
    return LivePipeline(pipeline_id=pipeline_id, epoch=0, stages=(stage,), head=0, rate=1.0, slots=6)


def test_each_node_takes_calls_from_half_of_its_layers_on_until_it_is_ready() -> None:
    scene = Scene("a", "b")
    assert scene.holds("a", 3) == ()
    assert scene.holds("a", 4) == (
        StartPipeline(pipeline=lone("p0", "a"), reason="a holds 4 of 8 layers for layer-wise prefill"),
    )
    assert scene.holds("a", 5) == ()
    (opened,) = scene.holds("b", 6)
    assert isinstance(opened, StartPipeline) and opened.pipeline == lone("p1", "b")
    assert repr(scene.group).endswith(", 2 load, 0 are ready>")
    assert scene.group.on_ready("a", "i-a") == (ClosePipeline(pipeline_id="p0", reason="a holds all layers"),)
    assert not scene.group.is_over
    assert scene.group.remove("b", "i-b", "stopped") == (
        ClosePipeline(pipeline_id="p1", reason="b is lost (stopped)"),
    )
    assert scene.group.is_over


def test_only_layers_from_the_first_one_on_count() -> None:
    scene = Scene("a")
    assert scene.group.on_layers("a", "i-a", 0b11111110) == ()
    assert scene.group.on_layers("a", "i-a", 0b11101111) != ()


def test_where_others_have_room_calls_come_late() -> None:
    scene = Scene()
    scene.room(True)
    for node in ("a", "b"):
        scene.group.add(node, f"i-{node}", 0)
        assert scene.holds(node, 6) == ()
    assert len(scene.holds("a", 7)) == 1 and scene.room(True) == ()
    (opened,) = scene.room(False)
    assert isinstance(opened, StartPipeline) and opened.pipeline == lone("p1", "b")
    assert scene.room(False) == ()


def test_one_that_was_lost_takes_none_before_it_is_ready() -> None:
    scene = Scene("a")
    scene.holds("a", 4)
    assert scene.group.on_lost("p0", 1, "a", "another epoch") == ()
    assert scene.group.on_lost("p0", 0, "a", "no room") == ()
    assert scene.holds("a", 7) == ()
    assert scene.group.on_ready("a", "i-a") == () and scene.group.is_over


def test_reports_of_another_instance_are_ignored() -> None:
    scene = Scene("a")
    assert scene.group.on_layers("a", "other", 0xFF) == ()
    assert scene.group.on_ready("a", "other") == scene.group.remove("a", "other", "") == ()
    assert scene.group.on_ready("b", "i-b") == ()
    scene.holds("a", 4)
    assert scene.group.add("a", "i-a2", 0) == (ClosePipeline(pipeline_id="p0", reason="it restarted"),)
