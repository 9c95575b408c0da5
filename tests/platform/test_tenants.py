"""Tenants that deploy, share and call, by the command line, on a platform with two gateways."""

from collections.abc import Iterator

import pytest

from benchmarks.harness.local_platform import RunningPlatform
from tests.fixtures.platform import Platform


@pytest.fixture(scope="module")
def tenants(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    data = tmp_path_factory.mktemp("tenants") / "data"
    platform = Platform(data=data, flags=("--nodes", "1", "--gateways", "2"))
    platform.up()
    yield platform
    platform.down()


def key(platform: Platform, tenant: str, role: str) -> tuple[str, str]:
    made = platform.json("keys", "create", "--tenant", tenant, "--role", role)
    assert made["role"] == role
    return ("--api-key", made["key"])


def invoked(platform: Platform, name: str, key: tuple[str, str]) -> set[int]:
    """Return the exit codes of a call through each gateway."""
    urls = RunningPlatform.of(platform.data).urls
    assert len(urls) == 2
    calls = [platform.run("invoke", name, "-d", "{}", *key, "--url", url, check=False) for url in urls]
    return {call.returncode for call in calls}


def test_tenants_deploy_and_share(tenants: Platform) -> None:
    acme, globex = (key(tenants, tenant, "deployer") for tenant in ("acme", "globex"))
    caller, viewer = key(tenants, "globex", "caller"), key(tenants, "watch", "viewer")
    made = tenants.json("deploy", "builtin:echo", "--name", "mine", *acme)
    assert (made["name"], made["version"]) == ("mine", 1)
    assert invoked(tenants, "mine", acme) == {0}
    for other in (globex, caller):
        assert invoked(tenants, "mine", other) == {4}
        assert tenants.json("list", *other) == []
    for command in (("describe", "mine"), ("logs", "mine"), ("delete", "mine", "--yes")):
        assert tenants.run(*command, *globex, check=False).returncode == 4
    taken = tenants.run("deploy", "builtin:echo", "--name", "mine", *globex, check=False)
    assert (taken.returncode, "the name 'mine' is taken" in taken.stderr) == (5, True)
    (row,) = tenants.json("list", *viewer)
    assert (row["name"], row["owner"], row["visibility"], row["shared_with"]) == (
        "mine",
        "acme",
        "private",
        [],
    )
    assert "acme" in tenants.run("list").stdout and "acme; private" in tenants.run("describe", "mine").stdout

    shared = tenants.json("share", "mine", "--with", "globex,initech", "--remove", "initech", *acme)
    assert shared == {"name": "mine", "owner": "acme", "visibility": "private", "shared_with": ["globex"]}
    tenants.until("both gateways let it call", lambda: invoked(tenants, "mine", caller) == {0})
    assert [row["name"] for row in tenants.json("list", *globex)] == ["mine"]
    assert tenants.run("describe", "mine", *globex).stdout.count("acme; private") == 1
    denied = tenants.run("scale", "mine", "--instances", "0", *globex, check=False)
    assert (denied.returncode, "another owner" in denied.stderr) == (3, True)
    tenants.run("share", "mine", "--remove", "globex", *acme)
    tenants.until("both gateways refuse", lambda: invoked(tenants, "mine", caller) == {4})

    for command in (
        ("scale", "mine", "--instances", "1"),
        ("warm", "mine"),
        ("rollback", "mine", "--to", "1"),
    ):
        tenants.run(*command, *acme)
    assert tenants.json("evict", "mine", *acme)["dropped"] is None  # deployers do not see nodes
    assert tenants.run("nodes", *acme, check=False).returncode == 3
    assert (
        tenants.json("nodes", *viewer) and tenants.run("keys", "list", *viewer, check=False).returncode == 3
    )
    assert [row["tenant"] for row in tenants.json("usage", "report", *acme)] == ["acme"]
    tenants.run("delete", "mine", "--yes", *acme)


def test_admins_and_billing(tenants: Platform) -> None:
    billing, initech = key(tenants, "finance", "billing"), key(tenants, "initech", "caller")
    tenants.run("deploy", "builtin:echo", "--name", "open")
    assert invoked(tenants, "open", initech) == {0}
    tenants.run("deploy", "builtin:echo", "--name", "given", "--owner", "acme", "--share", "globex")
    (given,) = [row for row in tenants.json("list") if row["name"] == "given"]
    assert (given["owner"], given["shared_with"]) == ("acme", ["globex"])
    assert invoked(tenants, "given", initech) == {4}
    tenants.run("share", "given", "--with", "all")
    tenants.until("all may call it", lambda: invoked(tenants, "given", initech) == {0})
    assert "initech" in {row["tenant"] for row in tenants.json("usage", "report", *billing)}
    assert tenants.json("usage", "check", *billing)["verdict"] in ("open", "exact")
    for command in (("invoke", "open", "-d", "{}"), ("list",), ("nodes",), ("keys", "list")):
        assert tenants.run(*command, *billing, check=False).returncode == 3
    for wrong in (("--with", "all", "--with", "globex"), ()):
        assert tenants.run("share", "given", *wrong, check=False).returncode == 2
