"""Which instances run prompts, and which continue calls. Pure."""

from hypothesis import given
from hypothesis import strategies as st

from gateway.planning.roles import RoleNeed, assign_roles
from registry.records.live import InstanceRole

PREFILL, DECODE = InstanceRole.PREFILL, InstanceRole.DECODE
calls_by_instance = st.lists(st.integers(0, 20), max_size=9).map(lambda calls: of(*calls))
needs = st.builds(RoleNeed, prefill=st.integers(0, 12), decode=st.integers(0, 12))
roles = st.dictionaries(st.integers(0, 9).map("i{}".format), st.sampled_from([PREFILL, DECODE]))


def of(*calls: int) -> dict[str, int]:
    return {f"i{n}": count for n, count in enumerate(calls)}


def test_a_single_instance_does_both() -> None:
    assert assign_roles(of(3), {"i0": PREFILL}, RoleNeed(prefill=1, decode=1)) == {}


def test_decode_goes_ahead_of_prefill() -> None:
    found = assign_roles(of(0, 0, 0, 0), {}, RoleNeed(prefill=3, decode=3))
    assert list(found.values()).count(DECODE) == 3


def test_the_instance_with_the_fewest_calls_changes() -> None:
    present = {"i0": DECODE, "i1": DECODE, "i2": DECODE, "i3": PREFILL}
    found = assign_roles(of(5, 1, 3, 0), present, RoleNeed(prefill=2, decode=2))
    assert found == {**present, "i1": PREFILL}
    present = {"i0": PREFILL, "i1": PREFILL, "i2": DECODE}
    found = assign_roles(of(4, 2, 9), present, RoleNeed(prefill=1, decode=2))
    assert found == {**present, "i1": DECODE}


@given(calls_by_instance, roles, needs)
def test_both_roles_are_filled_and_nothing_changes_without_need(
    instances: dict[str, int], present: dict[str, InstanceRole], need: RoleNeed
) -> None:
    found = assign_roles(instances, present, need)
    if len(instances) < 2:
        assert found == {}
        return
    assert set(found) == set(instances)
    assert {PREFILL, DECODE} == set(found.values())
    decoding = list(found.values()).count(DECODE)
    assert decoding >= min(need.decode, len(instances) - 1)
    assert assign_roles(instances, found, need) == found
    kept = {id_ for id_ in found if present.get(id_) in (None, found[id_])}
    changed = set(found) - kept
    assert len({found[id_] for id_ in changed}) <= 1, "no two swap their roles"
