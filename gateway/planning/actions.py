"""Actions that the planner decides and the controller executes."""

from collections.abc import Mapping
from dataclasses import dataclass

from gateway.cluster.state_cache import VersionKey
from gateway.planning.rollouts import RolloutAction
from registry.messages.images import ImageHolder, LinkPeer
from registry.records.cast import CastRecord
from registry.records.function import FunctionVersion
from registry.records.instance import InstanceGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class StartAction:
    """Start `instance_id` of `version` on `node`; its bytes come by `cast`, `holders`, disk or store.

    `room_bytes` is the arena space that the plan assumed. A `live` start may be a stage of a pipeline while
    it loads; from host memory it loads the layers from `first_layer` on first. With a `host_copy` it loads
    into host memory first. A member of a `group` loads its own layers only.
    """

    instance_id: str
    version: FunctionVersion
    node: str
    holders: tuple[ImageHolder, ...]
    max_concurrency: int
    room_bytes: int = 0
    cast: CastRecord | None = None
    live: bool = False
    first_layer: int = 0
    host_copy: bool = False
    group: InstanceGroup | None = None

    @property
    def key(self) -> VersionKey:
        return VersionKey(self.version.function, self.version.version)

    @property
    def loads_whole(self) -> bool:
        """Whether the node loads a whole image, of which others can read it."""
        return self.version.image is not None and self.group is None


@dataclass(frozen=True, slots=True, kw_only=True)
class FailStartAction:
    """Publish a failed start on each node of `starts` (node to instance id), so that queued calls fail.

    No start of `version` is possible, for `reason`.
    """

    version: FunctionVersion
    starts: Mapping[str, str]
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StopAction:
    """Drain and stop an instance; its calls have `grace_s` to finish."""

    instance_id: str
    node: str
    grace_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefetchAction:
    """Prefetch the version's image into the host tier of `node`.

    `pin` makes it a copy that the cluster keeps; with `preserve_pinned` it evicts no other pinned copy.
    """

    version: FunctionVersion
    node: str
    holders: tuple[ImageHolder, ...]
    pin: bool = False
    preserve_pinned: bool = False
    cast: CastRecord | None = None

    @property
    def loads_whole(self) -> bool:
        """Whether there is an image, which is loaded as a whole."""
        return self.version.image is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class UnpinAction:
    """Unpin the copy in the host tier of `node`."""

    image: str
    node: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DropAction:
    """Drop an idle image from a tier of `node`."""

    image: str
    node: str
    tier: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchVersionAction:
    """Read a version record that the change feed did not carry."""

    key: VersionKey


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchLayersAction:
    """Read the sizes of a version's layers, of which a group is made."""

    version: FunctionVersion


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareLinksAction:
    """Connect the node to these peers before a cast needs it."""

    node: str
    peers: tuple[LinkPeer, ...]


Action = (
    StartAction
    | FailStartAction
    | StopAction
    | PrefetchAction
    | UnpinAction
    | DropAction
    | FetchVersionAction
    | FetchLayersAction
    | PrepareLinksAction
    | RolloutAction
)
