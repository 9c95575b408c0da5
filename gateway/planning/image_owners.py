"""Image owners: the host that keeps the pinned copy of each deployed image, by rendezvous hashing. Pure.

Each host has a score for each image, which depends on these two alone ("highest random weight", Thaler and
Ravishankar 1998; weighted by the host's memory as -w / ln u). An image is owned by the host with the highest
score among those that have pinned it already; else among those that hold a copy; else among those with room.
So nothing is copied while a copy exists, and when hosts come and go only their own images change owners.

Loads are bounded ("consistent hashing with bounded loads", Mirrokni, Thorup and Zadimoghaddam 2018): a host
owns at most `1 + _SLACK` of its share of all bytes, and the images with its lowest scores go to other hosts.
"""

import hashlib
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from gateway.cluster.state_cache import ClusterStateCache
from registry.records.function import FunctionVersion
from registry.records.node import NodeRecord, Tier

_SLACK = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCopy:
    """One host's copy of an image; `node` is the node of the host that requests are sent to.

    `settled`: no node of the host still needs it, to check the image or to write it to the disk.
    """

    image: str
    host: str
    node: str
    nbytes: int
    last_used_at: float
    pinned: bool
    settled: bool


HostCopies = Mapping[str, Mapping[str, HostCopy]]  # by image, then by host


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnerHost:
    """A host as an owner of images.

    `weight` is its share of images, `room_bytes` the memory for new copies, and `max_bytes` a hard limit on
    the bytes that it owns.
    """

    id: str
    weight: int
    room_bytes: int
    max_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnedImage:
    """An image that needs an owner: the hosts that have it pinned, and others that hold a copy."""

    digest: str
    nbytes: int
    pinned: frozenset[str] = frozenset()
    holders: frozenset[str] = frozenset()


def assign_owners(
    images: Iterable[OwnedImage],
    hosts: Iterable[OwnerHost],
    fetchers: Callable[[OwnedImage], Collection[str]],
) -> dict[str, str]:
    """Return the owner of each image, by digest; an image that fits on no host has none.

    `fetchers` returns the hosts that could fetch a new copy. An image leaves a host that has it pinned only
    if the host owns more than its bound or its `max_bytes`.
    """
    assignment = _Assignment(hosts)
    by_digest = {image.digest: image for image in images}
    assignment.set_shares(sum(image.nbytes for image in by_digest.values()))
    # Large ones first: small ones fill what these leave of the bounds.
    ordered = sorted(by_digest.values(), key=lambda image: (-image.nbytes, image.digest))
    assignment.assign_pairs([(image, host) for image in ordered for host in image.pinned])
    assignment.assign_pairs([(image, host) for image in ordered for host in image.holders])
    for image in ordered:
        if image.digest not in assignment.owners:
            assignment.assign_new(image, fetchers(image))
    return assignment.owners


@lru_cache(1 << 16)
def score(image: str, host: str, weight: int) -> float:
    """Return the rendezvous score of a host for an image; scores are proportional to `weight` on average."""
    draw = int.from_bytes(hashlib.blake2b(f"{image}\0{host}".encode(), digest_size=8).digest(), "big")
    return -weight / math.log((draw + 0.5) / 2.0**64)


class _Assignment:
    """Owners as far as they are assigned, and the bytes that each host owns by them."""

    def __init__(self, hosts: Iterable[OwnerHost]) -> None:
        self.owners: dict[str, str] = {}
        self._hosts = {host.id: host for host in hosts if host.weight > 0}
        self._owned = dict.fromkeys(self._hosts, 0)
        self._copied = dict.fromkeys(self._hosts, 0)  # of these, bytes that are not on the host yet
        self._bounds: dict[str, float] = {}

    def set_shares(self, total_bytes: int) -> None:
        """Bound each host to its share of all bytes, with slack."""
        weights = sum(host.weight for host in self._hosts.values())
        self._bounds = {
            host.id: (1 + _SLACK) * total_bytes * host.weight / weights for host in self._hosts.values()
        }

    def assign_pairs(self, pairs: Iterable[tuple[OwnedImage, str]]) -> None:
        """Assign images to hosts of `pairs` within the bounds, those with the highest scores first."""
        ranked = [(self._score(image, host), image, host) for image, host in pairs if host in self._hosts]
        for _, image, host in sorted(ranked, key=lambda row: (-row[0], row[1].digest, row[2])):
            if image.digest not in self.owners and self._is_bounded(image, host):
                self._assign(image, host)

    def assign_new(self, image: OwnedImage, fetchers: Collection[str]) -> None:
        """Assign an image that has no copy within the bounds.

        The order is: a new copy within the bounds, an existing copy, a new copy where there is room, and a
        new copy that evicts others.
        """
        copies = [host for host in image.pinned | image.holders if host in self._hosts]
        new = [host for host in fetchers if host in self._hosts and self._is_within_max(image, host)]
        roomy = [host for host in new if self._has_room(image, host)]
        bounded = [host for host in roomy if self._is_bounded(image, host)]
        if bounded:
            owner = max(bounded, key=lambda host: (self._score(image, host), host))
            return self._assign(image, owner, is_new=True)
        kept = [host for host in copies if self._is_within_max(image, host)]
        for candidates, is_new in ((kept, False), (roomy, True), (copies, False), (new, True)):
            if candidates:
                return self._assign(image, min(candidates, key=lambda h: self._load(image, h)), is_new=is_new)
        return None

    def _load(self, image: OwnedImage, host: str) -> tuple[bool, float, float]:
        """Rank hosts beyond the bounds: those that pinned the image, then by load, then by score."""
        share = self._owned[host] / self._hosts[host].weight
        return host not in image.pinned, share, -self._score(image, host)

    def _assign(self, image: OwnedImage, host: str, *, is_new: bool = False) -> None:
        self.owners[image.digest] = host
        self._owned[host] += image.nbytes
        self._copied[host] += image.nbytes * is_new

    def _score(self, image: OwnedImage, host: str) -> float:
        return score(image.digest, host, self._hosts[host].weight)

    def _is_bounded(self, image: OwnedImage, host: str) -> bool:
        owned = self._owned[host]
        bounded = owned == 0 or owned + image.nbytes <= self._bounds[host]
        return bounded and self._is_within_max(image, host)

    def _is_within_max(self, image: OwnedImage, host: str) -> bool:
        return self._owned[host] + image.nbytes <= self._hosts[host].max_bytes

    def _has_room(self, image: OwnedImage, host: str) -> bool:
        return self._copied[host] + image.nbytes <= self._hosts[host].room_bytes


def host_copies(nodes: Iterable[NodeRecord]) -> HostCopies:
    """Return the complete copies in the nodes' host memory."""
    copies: dict[str, dict[str, HostCopy]] = {}
    for node in nodes:
        for holding in node.holdings:
            if Tier.HOST not in holding.tiers:
                continue
            hosts = copies.setdefault(holding.image, {})
            known = hosts.get(node.host)
            settled = holding.settled and (known is None or known.settled)
            if known is None or (known.last_used_at, known.node) < (holding.last_used_at, node.id):
                hosts[node.host] = HostCopy(
                    image=holding.image,
                    host=node.host,
                    node=node.id,
                    nbytes=holding.bytes,
                    last_used_at=holding.last_used_at,
                    pinned=holding.pinned,
                    settled=settled,
                )
            else:
                hosts[node.host] = replace(known, settled=settled)
    return copies


def current_versions(state_cache: ClusterStateCache) -> dict[str, FunctionVersion]:
    """Return a version of each image that requests go to: current versions, and those rolled out."""
    versions = (version for name in state_cache.functions for version in state_cache.served(name))
    return {version.image: version for version in versions if version.image}


def kept_images(state_cache: ClusterStateCache) -> set[str]:
    """Return the images of these versions of which a host copy is kept."""
    kept = (name for name, head in state_cache.functions.items() if head.scaling.host_copies)
    versions = (version for name in kept for version in state_cache.served(name))
    return {version.image for version in versions if version.image}


def is_outdated(state_cache: ClusterStateCache, image: str) -> bool:
    """Return whether all versions with this image are older than the current one, and none is rolled out."""
    numbers = [
        version.version < head.current and version.version != head.candidate
        for version in state_cache.versions(image)
        if (head := state_cache.functions.get(version.function)) is not None
    ]
    return bool(numbers) and all(numbers)


def nodes_by_host(nodes: Iterable[NodeRecord]) -> dict[str, Sequence[NodeRecord]]:
    """Group nodes by their host, which shares one host tier."""
    hosts: dict[str, list[NodeRecord]] = {}
    for node in nodes:
        hosts.setdefault(node.host, []).append(node)
    return dict(hosts)
