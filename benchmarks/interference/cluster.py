"""The functions and copies of a run: one function serves streams, the image of another one is cast."""

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.testbed.hosted_platform import PlatformError
from cli.client import Client
from cli.commands.deploy import registration, send
from cli.commands.scaling import follow
from cli.upload.bundle import Bundle
from registry.records.live import InstanceRole

SERVED, WEIGHTS = "served", "weights"
_LONG_S = 86_400.0
_PATIENCE_S = 120.0
_PAUSE_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingNodes:
    """The nodes that serve, by role, and one of the others.

    `sender` sends what it serves; `receiver` receives K and V, or is "".
    """

    sender: str
    receiver: str = ""
    other: str = ""

    def named(self, role: str) -> str:
        """Return the node with a role: the name of one of the fields."""
        return {"sender": self.sender, "receiver": self.receiver, "other": self.other}[role]

    def role_of(self, node: str) -> str:
        """Return the role of a node; its own name if it has none."""
        return {self.sender: "sender", self.receiver: "receiver", self.other: "other"}.get(node, node)


@dataclass(frozen=True, slots=True, kw_only=True)
class CastSeen:
    """A complete cast: from its plan until the last target had the image, and its sources."""

    seconds: float
    sources: tuple[str, ...]


def deploy(client: Client, served: Bundle, weights: Bundle) -> None:
    """Deploy both functions while the cluster has one node, which then holds both images and serves."""
    common = {"keep_alive_s": _LONG_S, "host_keep_alive_s": _LONG_S, "live": "off"}
    for name, bundle, scaling in (
        (WEIGHTS, weights, {"min_instances": 0, "host_copies": 0}),
        (SERVED, served, {"min_instances": 1, "max_instances": 2, "target_concurrency": 1024}),
    ):
        send(client, bundle)
        body = registration(name, bundle, {**common, **scaling})
        client.json("POST", "/admin/functions", json=body)
    _until("an instance is ready", lambda: len(_ready(client)) == 1)


def serve_alone(client: Client, nodes: Sequence[str]) -> ServingNodes:
    """Return the node of the one instance, and another one of the two nodes."""
    (node,) = _ready(client).values()
    return ServingNodes(sender=node, other=next(one for one in nodes if one != node))


def serve_disaggregated(client: Client, nodes: Sequence[str]) -> ServingNodes:
    """Serve on two nodes, one for prompts; return them once they have their roles."""
    body: dict[str, Any] = {"instances": 2, "on": list(nodes), "wait": True}
    client.request("POST", f"/admin/functions/{SERVED}/scale", json=body)
    settings = {"min_instances": 2, "policy": "load", "serving": "disaggregated"}
    client.request("PATCH", f"/admin/functions/{SERVED}", json={"scaling": settings})
    _until("two instances have roles", lambda: len(_roles(client)) == 2)
    by_role = {role: node for node, role in _roles(client).items()}
    return ServingNodes(sender=by_role[InstanceRole.PREFILL], receiver=by_role[InstanceRole.DECODE])


def hold(client: Client, nodes: Collection[str]) -> None:
    """Have exactly these nodes hold the image that is cast, in host memory."""
    held = _holders(client)
    if missing := sorted(set(nodes) - held):
        follow(client, f"/admin/functions/{WEIGHTS}/warm", {"nodes": None, "on": missing})
    if extra := sorted(held - set(nodes)):
        client.request("POST", f"/admin/functions/{WEIGHTS}/drop", json={"tier": "host", "on": extra})
    _until(f"{', '.join(sorted(nodes))} hold the image", lambda: _holders(client) == set(nodes))


def cast(client: Client, targets: Sequence[str]) -> CastSeen:
    """Cast the image to these nodes, which lack it. Raises PlatformError."""
    follow(client, f"/admin/functions/{WEIGHTS}/warm", {"nodes": None, "on": list(targets)})
    _until("the cast is complete", lambda: _last_cast(client)["state"] != "running")
    seen = _last_cast(client)
    parts = {part["node"]: part["state"] for part in seen["nodes"]}
    if seen["state"] != "complete" or not parts.keys() >= set(targets):
        raise PlatformError(f"a cast to {', '.join(targets)} is {seen['state']}: {parts}")
    sources = tuple(sorted(node for node, state in parts.items() if state == "source"))
    return CastSeen(seconds=float(seen["seconds"]), sources=sources)


def _last_cast(client: Client) -> dict[str, Any]:
    found: dict[str, Any] = client.json("GET", f"/admin/casts?function={WEIGHTS}")["casts"][0]
    return found


def _ready(client: Client) -> dict[str, str]:
    """Return the nodes of ready instances, by id."""
    shown = client.json("GET", f"/admin/functions/{SERVED}")["instances"]
    return {one["instance_id"]: one["node"] for one in shown if one["state"] == "ready"}


def _roles(client: Client) -> dict[str, InstanceRole]:
    """Return the roles by node."""
    live = client.json("GET", f"/admin/functions/{SERVED}")["live"] or {}
    ready = _ready(client)
    return {ready[id_]: InstanceRole(role) for id_, role in live.get("roles", {}).items() if id_ in ready}


def _holders(client: Client) -> set[str]:
    tag = f"{WEIGHTS}:1"
    shown = client.json("GET", "/admin/nodes")["nodes"]
    return {node["id"] for node in shown if tag in node["tiers"]["host"]}


def _until(what: str, holds: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + _PATIENCE_S
    while not holds():
        if time.monotonic() > deadline_s:
            raise PlatformError(f"timed out after {_PATIENCE_S:g} s waiting until {what}")
        time.sleep(_PAUSE_S)
