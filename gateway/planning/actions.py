"""What the planner decides and the controller carries out."""

from collections.abc import Mapping
from dataclasses import dataclass

from gateway.directory import VersionKey
from registry.cast import CastRecord
from registry.function import FunctionVersion
from registry.messages import Holder


@dataclass(frozen=True, slots=True, kw_only=True)
class StartOn:
    """Start `instance_id` of `version` on `node`, its bytes by `cast`, where that does not bring them from
    `holders` (none: from disk or store).

    `room_bytes` is how much of the arena it was thought to have. One that is `live` may be a stage of a
    pipeline while it loads; from its host's memory it loads the layers from `first_layer` on first.
    """

    instance_id: str
    version: FunctionVersion
    node: str
    holders: tuple[Holder, ...]
    max_concurrency: int
    room_bytes: int = 0
    cast: CastRecord | None = None
    live: bool = False
    first_layer: int = 0

    @property
    def key(self) -> VersionKey:
        return VersionKey(self.version.function, self.version.version)


@dataclass(frozen=True, slots=True, kw_only=True)
class GiveUp:
    """No start of `version` can be made: tell it as a failed start on each node of `starts`, a map to
    instance ids, so that calls do not wait in vain."""

    version: FunctionVersion
    starts: Mapping[str, str]
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StopOn:
    """Drain and stop an instance; its calls have `grace_s` to finish."""

    instance_id: str
    node: str
    grace_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmOn:
    """Bring the version's image into the host tier of `node`, from where a start would have it; `keep` makes
    it the cluster's kept copy, and one that is `yielding` pushes no other kept copy out."""

    version: FunctionVersion
    node: str
    holders: tuple[Holder, ...]
    keep: bool = False
    yielding: bool = False
    cast: CastRecord | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class UnkeepOn:
    """The copy in the host tier of `node` need not be kept any more."""

    image: str
    node: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DropFrom:
    """Drop an idle image from a tier of `node`."""

    image: str
    node: str
    tier: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchVersion:
    """Read a version's record, which the feed did not carry."""

    key: VersionKey


Action = StartOn | GiveUp | StopOn | WarmOn | UnkeepOn | DropFrom | FetchVersion
