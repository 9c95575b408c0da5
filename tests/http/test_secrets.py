"""Secrets over HTTP: set, listed, deleted, never read; a deploy names what is missing."""

import logging

import pytest

pytest.importorskip("cryptography")

from registry.records.secret import MAX_SECRET_BYTES
from tests.fixtures.gateway_http import Gateway, gateway

VALUE = "hunter2-hunter2"
PATH = "/admin/functions/chat/secrets"
NEEDS_TOKEN = b"handler: handler.py:handle\nsecrets: [TOKEN]\n"


def handler(gw: Gateway, text: bytes = NEEDS_TOKEN) -> dict[str, object]:
    files = {"function.yaml": text, "handler.py": b"def handle(request): return 1"}
    assets = {name: gw.blobs.put(content) for name, content in files.items()}
    return {"name": "chat", "task": "handler", "architecture": "handler", "assets": assets}


async def test_no_answer_log_or_record_has_a_value(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with gateway(secret=b"the secret of this cluster") as gw, gw.http() as http:
        made = await http.put(f"{PATH}/TOKEN", json={"value": VALUE})
        assert made.status_code == 200 and made.json()["bytes"] == len(VALUE)
        bad = [
            await http.put(f"{PATH}/TOKEN", json={"value": f"{VALUE}\0"}),
            await http.put(f"{PATH}/TOKEN", json={"value": VALUE * MAX_SECRET_BYTES}),
            await http.put(f"{PATH}/TOKEN", json={"value": [VALUE]}),
            await http.put(f"{PATH}/TOKEN", content=f'{{"value": "{VALUE}'),
            await http.put(f"{PATH}/LD_PRELOAD", json={"value": VALUE}),
            await http.put(f"{PATH}/token", json={"value": VALUE}),
            await http.put("/admin/functions/Bad_Name/secrets/TOKEN", json={"value": VALUE}),
        ]
        assert {one.status_code for one in bad} == {400, 422}
        listed = await http.get(PATH)
        assert [(one["key"], one["bytes"]) for one in listed.json()["secrets"]] == [("TOKEN", len(VALUE))]
        deployed = await http.post("/admin/functions", json=handler(gw))
        assert deployed.status_code == 201
        shown = await http.get("/admin/functions/chat")
        assert shown.json()["current"]["secrets"] == ["TOKEN"]
        texts = [answer.text for answer in (made, listed, deployed, shown, *bad)]
        known = repr(await gw.state.function_secrets("chat"))
        assert not any(VALUE in text for text in (*texts, known, caplog.text))


async def test_callers_reach_no_secret() -> None:
    async with gateway() as gw, gw.http(gw.caller_key) as http:
        for refused in (
            await http.put(f"{PATH}/TOKEN", json={"value": VALUE}),
            await http.get(PATH),
            await http.delete(f"{PATH}/TOKEN"),
            await http.post("/admin/secrets/reencrypt"),
        ):
            assert refused.status_code == 403


async def test_a_deploy_without_its_secrets_is_refused() -> None:
    async with gateway() as gw, gw.http() as http:
        refused = await http.post("/admin/functions", json=handler(gw))
        error = refused.json()["error"]
        assert (refused.status_code, error["code"]) == (422, "secret_missing")
        assert "needs the secrets TOKEN" in error["message"] and "secrets set chat TOKEN" in error["message"]
        assert (await http.get("/admin/functions/chat")).status_code == 404
        await http.put(f"{PATH}/TOKEN", json={"value": VALUE})
        assert (await http.post("/admin/functions", json=handler(gw))).status_code == 201


async def test_a_secret_that_the_current_version_needs_stays() -> None:
    async with gateway() as gw, gw.http() as http:
        await http.put(f"{PATH}/TOKEN", json={"value": VALUE})
        await http.post("/admin/functions", json=handler(gw))
        kept = await http.delete(f"{PATH}/TOKEN")
        assert kept.status_code == 409 and "version 1 of chat needs TOKEN" in kept.json()["error"]["message"]
        await http.post("/admin/functions", json=handler(gw, b"handler: handler.py:handle\n"))
        assert (await http.delete(f"{PATH}/TOKEN")).status_code == 200
        assert (await http.delete(f"{PATH}/TOKEN")).status_code == 404
        back = await http.post("/admin/functions/chat/rollback", json={})
        assert (back.status_code, back.json()["error"]["code"]) == (422, "secret_missing")


async def test_secrets_of_another_cluster_secret_are_reported() -> None:
    async with gateway(secret=b"the secret of one cluster") as gw, gw.http() as http:
        await http.put(f"{PATH}/TOKEN", json={"value": VALUE})
        async with gateway(secret=b"the secret of another one", state=gw.state) as other:
            async with other.http() as there:
                refused = await there.post("/admin/functions", json=handler(other))
                assert refused.status_code == 422 and "another cluster secret" in refused.text
                done = await there.post("/admin/secrets/reencrypt")
                assert done.json() == {"reencrypted": [], "unreadable": ["chat/TOKEN"]}
