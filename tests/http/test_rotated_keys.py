"""Rotation of API keys: the new one has the rights and limits of the former, which ends after the grace."""

import asyncio
import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from cli.group import cli
from tests.fixtures.gateway_http import gateway

LIMITS = {"requests_per_minute": 60, "max_concurrent": 3, "spend_limit_nanos": 5_000, "spend_period": "total"}


async def test_the_successor_is_like_the_former_key_and_has_spent_nothing() -> None:
    async with gateway() as gw, gw.http() as admin:
        body = {"tenant": "acme", "name": "ci", "functions": ["coder"], "expires_in_s": 600, **LIMITS}
        former = (await admin.post("/admin/keys", json=body)).json()
        answer = await admin.post(f"/admin/keys/{former['id']}/rotate", json={"grace_s": 60})
        made = answer.json()
        assert answer.status_code == 201 and made["former_expires_at"] < former["expires_at"] - 500
        own = ("id", "key", "created_at", "expires_at", "former_expires_at")
        assert {**made, **dict.fromkeys(own)} == {**former, **dict.fromkeys(own)}
        lifetime_s = made["expires_at"] - made["created_at"]
        assert lifetime_s == pytest.approx(600, abs=1)
        listed = {key["id"]: key for key in (await admin.get("/admin/keys")).json()["keys"]}
        assert listed[former["id"]]["expires_at"] == made["former_expires_at"]
        assert listed[made["id"]]["spent_nanos"] == 0
        for key in (former, made):
            async with gw.http(key["key"]) as caller:
                assert (await caller.get("/v1/models")).status_code == 200


async def test_the_former_key_ends_with_the_grace_and_never_later_than_before() -> None:
    async with gateway() as gw, gw.http() as admin:
        brief = (await admin.post("/admin/keys", json={"tenant": "t", "expires_in_s": 60})).json()
        made = (await admin.post(f"/admin/keys/{brief['id']}/rotate", json={})).json()
        assert made["former_expires_at"] == brief["expires_at"]
        endless = (await admin.post("/admin/keys", json={"tenant": "t"})).json()
        made = (await admin.post(f"/admin/keys/{endless['id']}/rotate", json={"grace_s": 0})).json()
        assert made["expires_at"] is None
        async with gw.http(endless["key"]) as ended, gw.http(made["key"]) as caller:
            assert (await ended.get("/v1/models")).status_code == 401
            assert (await caller.get("/v1/models")).status_code == 200


async def test_what_cannot_be_rotated() -> None:
    async with gateway() as gw, gw.http() as admin, gw.http(gw.caller_key) as caller:
        count = len(await gw.state.keys())
        made = (await admin.post("/admin/keys", json={"tenant": "t"})).json()
        path = f"/admin/keys/{made['id']}/rotate"
        assert (await caller.post(path, json={})).status_code == 403
        assert (await admin.post("/admin/keys/abcd/rotate", json={})).status_code == 404
        assert (await admin.post(path, json={"grace_s": -1})).status_code == 422
        await admin.delete(f"/admin/keys/{made['id']}")
        refused = await admin.post(path, json={})
        assert refused.status_code == 409 and "revoked" in refused.json()["error"]["message"]
        assert len(await gw.state.keys()) == count + 1


async def test_the_command_replaces_the_admin_key_and_its_file(tmp_path: Path) -> None:
    async with gateway() as gw, gw.http() as admin:
        file, key_id = tmp_path / "admin.key", gw.admin_key.split("_")[1]
        file.write_text(gw.admin_key + "\n")

        async def run(*arguments: str) -> tuple[int, str]:
            env = {"HYPERCAST_URL": gw.url, "HYPERCAST_API_KEY": file.read_text().strip()}
            ended = await asyncio.to_thread(CliRunner(env=env).invoke, cli, ["keys", "rotate", *arguments])
            return ended.exit_code, ended.stdout

        keys = len(await gw.state.keys())
        code, _ = await run("abcd", "--key-file", str(file))
        assert code and len(await gw.state.keys()) == keys  # it is another key's file
        code, out = await run(key_id, "--grace", "1h", "--key-file", str(file), "-o", "json")
        made = json.loads(out)
        assert not code and file.read_text() == made["key"] + "\n" and made["role"] == "admin"
        code, out = await run(made["id"], "--grace", "0s")  # by the new key itself
        assert not code and out.startswith("hc_")
        assert (await admin.get("/admin/keys")).status_code == 200  # the first one, in its grace
