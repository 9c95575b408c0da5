"""What a call can be sent to: a ready instance, or a pipeline of nodes that are still loading."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from registry.instance import StartKind
from registry.live import Live, LivePipeline, LiveStage

_SHARED = 0.5  # of a node's time, where it serves alone and runs a stage too


class Server(Protocol):
    """An InstanceRecord is one. `instance_id` names it among all servers, and `node` is whom to send to;
    `max_concurrency` is how many calls it takes at once, 0 if that was not told."""

    @property
    def instance_id(self) -> str: ...

    @property
    def node(self) -> str: ...

    @property
    def max_concurrency(self) -> int: ...

    @property
    def start_kind(self) -> StartKind: ...

    @property
    def phases_ms(self) -> Mapping[str, float]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineServer:
    """A pipeline as a server: the node is that of its head."""

    pipeline: LivePipeline
    instance_id: str
    node: str
    max_concurrency: int
    start_kind: StartKind = StartKind.LIVE
    phases_ms: Mapping[str, float] = field(default_factory=dict)

    @property
    def head(self) -> LiveStage:
        return self.pipeline.stages[self.pipeline.head]

    @property
    def others(self) -> tuple[LiveStage, ...]:
        """The members besides the head."""
        return tuple(stage for stage in self.pipeline.stages if stage is not self.head)

    @property
    def runs_in_turns(self) -> bool:
        """Whether calls pass all stages token by token. A pair's source and a node that loads alone answer by
        themselves: what waits there is what is being worked on."""
        return not self.is_lone and self.pipeline.way is not Live.ZIGZAG

    @property
    def is_lone(self) -> bool:
        """Whether it is a node that loads alone: its calls stay there when its instance is ready."""
        return len(self.pipeline.stages) == 1


def server_of(pipeline: LivePipeline) -> PipelineServer:
    return PipelineServer(
        pipeline=pipeline,
        instance_id=pipeline.name,
        node=pipeline.stages[pipeline.head].node,
        max_concurrency=pipeline.slots,
    )


def slots_key(server: Server) -> str:
    """What calls there are counted under: those of a node that loads alone under its instance's name, which
    goes on with them when it is ready, and so has no room for as many more."""
    if isinstance(server, PipelineServer) and server.is_lone:
        return server.head.instance_id
    return server.instance_id


def rates_of(servers: Sequence[Server]) -> list[float]:
    """What each serves, in whole nodes; a member of a pipeline that serves alone too has less time."""
    pipelines = [server.pipeline for server in servers if isinstance(server, PipelineServer)]
    both = {one.instance_id for pipeline in pipelines for one in pipeline.switched}
    return [
        server.pipeline.rate
        if isinstance(server, PipelineServer)
        else (_SHARED if server.instance_id in both else 1.0)
        for server in servers
    ]
