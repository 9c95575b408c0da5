"""The network policies, evaluated as a network plugin does: who may reach whom, and nothing else."""

from ipaddress import ip_address, ip_network

import pytest

from tests.fixtures.manifests import (
    NAMESPACE,
    Object,
    components,
    documents,
    objects,
    pods,
    ports_of,
    selected,
)

GATEWAY, INVOKER, HANDLERS = "hypercast-gateway", "hypercast-invoker", "hypercast-handlers"
REDIS, BACKUP, RESTORE = "redis", "redis-backup", "redis-restore"
# (from, to, port): every connection between pods that the platform makes.
NEEDED = {
    *((one, REDIS, "redis") for one in (GATEWAY, INVOKER, HANDLERS, BACKUP)),
    *((GATEWAY, one, "channel") for one in (INVOKER, HANDLERS)),
    *((INVOKER, INVOKER, port) for port in ("channel", "cast", "stage")),
    *((one, other, "cast") for one in (INVOKER, HANDLERS) for other in (INVOKER, HANDLERS)),
}
METADATA = "169.254.169.254"


def rules(pod: str, direction: str) -> list[Object]:
    """Return the rules of all policies that select a pod."""
    return [
        rule
        for policy in objects("NetworkPolicy").values()
        if pod in selected(policy["spec"]["podSelector"])
        for rule in policy["spec"].get(direction, [])
    ]


def allows(rule: Object, peers: str, pod: str, port: str) -> bool:
    """Return whether a rule names a pod of this namespace and a port."""
    named = any(
        pod in selected(peer["podSelector"])
        for peer in rule[peers]
        if "podSelector" in peer and "namespaceSelector" not in peer
    )
    return named and port in {one["port"] for one in rule["ports"]}


def may_connect(source: str, target: str, port: str) -> bool:
    leaves = any(allows(rule, "to", target, port) for rule in rules(source, "egress"))
    return leaves and any(allows(rule, "from", source, port) for rule in rules(target, "ingress"))


def test_pods_reach_each_other_where_the_platform_needs_it_and_nowhere_else() -> None:
    every = {(a, b, port) for a in pods() for b in pods() for port in ports_of(b)}
    assert {link for link in every if may_connect(*link)} == NEEDED


def test_every_pod_is_isolated_in_both_directions() -> None:
    default = objects("NetworkPolicy")["default-deny"]["spec"]
    assert default == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    assert selected({}) == set(pods()) == {GATEWAY, INVOKER, HANDLERS, REDIS, BACKUP, RESTORE}
    for name, policy in objects("NetworkPolicy").items():
        assert name in {"default-deny", "dns"} or selected(policy["spec"]["podSelector"]) == {name}
        kinds = {key.capitalize() for key in ("ingress", "egress") if key in policy["spec"]}
        assert kinds <= set(policy["spec"]["policyTypes"]), "a rule of a kind that is not applied"


def test_only_the_gateway_is_open_to_other_namespaces() -> None:
    outside = {
        (pod, one["port"], *peer["namespaceSelector"]["matchLabels"].items())
        for pod in pods()
        for rule in rules(pod, "ingress")
        for peer in rule["from"]
        if "namespaceSelector" in peer
        for one in rule["ports"]
    }
    assert outside == {
        (GATEWAY, "https", ("hypercast/client", "true")),
        (GATEWAY, "metrics", ("kubernetes.io/metadata.name", "monitoring")),
    }


def test_names_are_asked_of_the_cluster_alone_and_redis_opens_nothing() -> None:
    assert rules(REDIS, "egress") == [] and rules(RESTORE, "egress") == rules(RESTORE, "ingress") == []
    for pod in (GATEWAY, INVOKER, HANDLERS, BACKUP):
        dns = [rule for rule in rules(pod, "egress") if {one["port"] for one in rule["ports"]} == {53}]
        ((peer,),) = [rule["to"] for rule in dns]
        assert peer["namespaceSelector"]["matchLabels"] == {"kubernetes.io/metadata.name": "kube-system"}


@pytest.mark.parametrize("name", ["handler-network", "object-store"])
def test_what_opens_the_internet_leaves_the_cluster_and_the_metadata_closed(name: str) -> None:
    (folder,) = (path for path in components() if path.name == name)
    ((_, policy),) = documents(folder)
    assert policy["metadata"]["namespace"] == NAMESPACE and policy["spec"]["policyTypes"] == ["Egress"]
    ((peer,),) = [rule["to"] for rule in policy["spec"]["egress"]]
    closed = [ip_network(one) for one in peer["ipBlock"]["except"]]
    for address in (METADATA, "10.96.0.1", "172.17.0.1", "192.168.1.1", "100.100.100.200", "127.0.0.1"):
        assert any(ip_address(address) in one for one in closed), address
    assert not any(ip_address("93.184.216.34") in one for one in closed)
    if name == "handler-network":
        assert selected(policy["spec"]["podSelector"]) == {HANDLERS}


def test_without_them_no_rule_names_an_address() -> None:
    peers = [peer for pod in pods() for rule in rules(pod, "egress") for peer in rule["to"]]
    assert peers and not any("ipBlock" in peer for peer in peers)
