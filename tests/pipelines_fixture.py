"""Nodes that do what the decisions on pipelines say, and check the law at each step."""

from collections.abc import Iterable

from gateway.live_spread import Place, Unfinished, share_of, spread
from gateway.model_layers import ModelLayers
from gateway.pipeline_actions import (
    Action,
    Alone,
    Dissolve,
    Event,
    Form,
    Gone,
    Holds,
    Loading,
    Pipeline,
    Reform,
)
from gateway.pipelines import Pipelines, PipelineSettings


class Cluster:
    """What the nodes hold and in which pipelines they serve, by the actions alone."""

    def __init__(self, layers: ModelLayers, settings: PipelineSettings | None = None) -> None:
        self.layers = layers
        self.decisions = Pipelines(layers, settings)
        self.held: dict[str, int] = {}
        self.pipelines: dict[int, Pipeline] = {}
        self.whole: dict[str, None] = {}
        self.log: list[Action] = []
        self.places: dict[str, set[str]] = {"": set()}  # by pipeline or node: requests; "": held
        self.requests: dict[str, Unfinished] = {}
        self.moves: dict[str, int] = {}

    def hear(self, *events: Event) -> tuple[Action, ...]:
        for event in events:
            if isinstance(event, Loading):
                self.held.setdefault(event.node, 0)
            elif isinstance(event, Holds) and event.node in self.held:
                self.held[event.node] |= event.blocks
            elif isinstance(event, Gone):
                self.held.pop(event.node, None)
                self.whole.pop(event.node, None)
                self.places[""] |= self.places.pop(event.node, set())
        actions = self.decisions.hear(events)
        for action in actions:
            assert action.reason
            self._apply(action)
        self.log.extend(actions)
        self._check()
        return actions

    def send(self, requests: Iterable[Unfinished], place: str) -> None:
        for request in requests:
            self.requests[request.request_id] = request
            self.places[place].add(request.request_id)
            self.moves[request.request_id] = 0

    def _apply(self, action: Action) -> None:
        if isinstance(action, Form):
            assert action.pipeline.number not in self.pipelines
            self.pipelines[action.pipeline.number] = action.pipeline
            self.places[_name(action.pipeline)] = set()
        elif isinstance(action, Reform):
            before = self.pipelines[action.pipeline.number]
            assert before.nodes == action.before.nodes and action.pipeline.epoch > before.epoch
            self.pipelines[action.pipeline.number] = action.pipeline
        elif isinstance(action, Alone):
            assert action.node not in self.whole
            self.whole[action.node] = None
            self.places[action.node] = set()
            if action.pipeline is not None:
                source = _name(self.pipelines[action.pipeline])
                share = share_of(self._at(source), action.sharers)
                self._move((request.request_id for request in share), source, action.node)
        elif isinstance(action, Dissolve):
            gone = self.pipelines.pop(action.pipeline.number)
            assert gone.nodes == action.pipeline.nodes
            source = _name(gone)
            places = [Place(name=n, rate=1.0, work_tokens=self._work(n)) for n in self.whole]
            for move in spread(self._at(source), places):
                self._move([move.request_id], source, move.place)
            assert not self.places.pop(source)

    def _at(self, place: str) -> list[Unfinished]:
        return [self.requests[name] for name in sorted(self.places[place])]

    def _work(self, place: str) -> int:
        return sum(request.work for request in self._at(place))

    def _move(self, requests: Iterable[str], source: str, target: str) -> None:
        for request in list(requests):
            self.places[source].remove(request)
            self.places[target].add(request)
            self.moves[request] += 1

    def _check(self) -> None:
        """No dead member, no layer that nobody runs or whose stage lacks blocks, no node in two pipelines."""
        seen: set[str] = set()
        for pipeline in self.pipelines.values():
            assert not seen & set(pipeline.nodes), "a node is in two pipelines"
            seen |= set(pipeline.nodes)
            assert len(set(pipeline.nodes)) == len(pipeline.nodes) > 1
            edges = [0, *(stage.last for stage in pipeline.stages)]
            assert [stage.first for stage in pipeline.stages] == edges[:-1] and edges[-1] == len(self.layers)
            for stage in pipeline.stages:
                held = self.held[stage.node]  # of a living node
                assert all(not need & ~held for need in self.layers.needs[stage.first : stage.last])
            assert pipeline.rate > 0
        everything = self.layers.all_blocks
        assert set(self.whole) == {
            node for node, held in self.held.items() if held & everything == everything
        }
        known = {pipeline.number: pipeline.stages for pipeline in self.decisions.pipelines}
        assert known == {number: pipeline.stages for number, pipeline in self.pipelines.items()}
        assert set(self.decisions.whole) == set(self.whole)
        assert sum(len(requests) for requests in self.places.values()) == len(self.requests)


def _name(pipeline: Pipeline) -> str:
    return f"pipeline-{pipeline.number}"
