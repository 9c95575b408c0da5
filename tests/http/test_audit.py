"""Every change leaves one record in the audit log, before it is made, and none is made without."""

import asyncio
import contextlib
import json
from typing import Any

import pytest

from gateway.api.operations import OPERATIONS
from gateway.schemas.operations import Operation
from registry.config.secrets import new_api_key
from registry.errors import StateUnavailable
from registry.memory.state import MemoryState
from registry.records.api_key import KeyRole
from registry.records.audit import AuditEntry, AuditLogName, AuditOutcome
from registry.records.function import FunctionTask
from tests.fixtures.gateway_http import Gateway, gateway

Entry = dict[str, Any]


async def entries(gw: Gateway, **where: str | int) -> list[Entry]:
    async with gw.http() as http:
        answered = await http.get("/admin/audit", params=where)
        assert answered.status_code == 200, answered.text
        found: list[Entry] = answered.json()["entries"]
        return found


class Failing(MemoryState):
    """A state whose audit log fails."""

    begins = ends = True

    async def add_audit_entry(self, entry: AuditEntry, **more: Any) -> None:
        if not self.begins:
            raise StateUnavailable("Redis does not answer")
        await super().add_audit_entry(entry, **more)

    async def end_audit_entry(self, entry_id: str, outcome: AuditOutcome, **more: Any) -> None:
        if not self.ends:
            raise StateUnavailable("Redis does not answer")
        await super().end_audit_entry(entry_id, outcome, **more)


_OF_ALL = ("usage.archive", "secret.reencrypt")  # changes without a target


@pytest.mark.parametrize("op", OPERATIONS, ids=lambda op: f"{op.method} {op.path}")
def test_every_route_that_may_change_something_says_how_it_is_recorded(op: Operation[Any]) -> None:
    changing = op.method not in ("get", "head")
    assert not (op.audit and op.unaudited)
    assert bool(op.audit or op.unaudited or op.calls) == changing
    if op.audit is not None:
        named = [parameter.name for parameter in op.parameters if parameter.place == "path"]
        fields = getattr(op.body, "__struct_fields__", ())
        assert bool(named) != (op.audit.target in fields) or op.audit.operation in _OF_ALL


async def test_a_change_is_recorded_with_who_what_and_from_where() -> None:
    async with gateway(gateway_id="g1") as gw, gw.http() as http:
        await gw.add_function("coder", FunctionTask.HANDLER)
        headers = {"x-request-id": "mine"}
        scaling = {"scaling": {"min_instances": 0, "max_instances": 7}}
        assert (await http.patch("/admin/functions/coder", json=scaling, headers=headers)).status_code == 200
        (entry,) = await entries(gw)
        key = next(key for key in await gw.state.keys() if key.name == "admin")
        assert entry["id"].startswith("req-") and entry["client_request_id"] == "mine"
        assert (entry["operation"], entry["target"], entry["gateway"]) == ("function.change", "coder", "g1")
        assert (entry["key_id"], entry["tenant"], entry["role"]) == (key.id, "ops", "admin")
        assert (entry["address"], entry["status"], entry["code"]) == ("127.0.0.1", 200, "")
        assert entry["fields"] == {"scaling.min_instances": 1, "scaling.max_instances": 1}
        assert entry["ended_at"] >= entry["at"]


async def test_reads_and_calls_are_not_recorded() -> None:
    async with gateway() as gw, gw.http() as http:
        await gw.add_function("coder", FunctionTask.HANDLER)
        for path in ("/admin/functions", "/admin/keys", "/admin/audit", "/v1/models", "/metrics"):
            assert (await http.get(path)).status_code == 200
        await http.post("/functions/coder/invoke", json={})
        assert (await http.post("/admin/blobs/missing", json={"digests": []})).status_code == 200
        assert await entries(gw) == []


async def test_a_new_key_is_recorded_and_no_secret_is() -> None:
    async with gateway() as gw, gw.http() as http:
        body = {"tenant": "acme", "name": "a secret name", "requests_per_minute": 60}
        made = (await http.post("/admin/keys", json=body)).json()
        (entry,) = await entries(gw, operation="key.")
        assert (entry["operation"], entry["target"], entry["made"]) == ("key.create", "acme", made["id"])
        assert (entry["status"], set(entry["fields"])) == (201, set(body))
        text = json.dumps(entry)
        assert "a secret name" not in text and made["key"].split("_", 2)[2] not in text
        await http.delete(f"/admin/keys/{made['id']}")
        revoked, created = await entries(gw)
        assert (revoked["operation"], revoked["target"], revoked["status"]) == ("key.revoke", made["id"], 200)
        assert created == entry


async def test_failed_changes_have_their_status_and_code() -> None:
    async with gateway() as gw, gw.http() as http:
        await http.delete("/admin/functions/none")
        await http.post("/admin/keys", content=b"{")
        await http.post("/admin/keys", json={"tenant": 7, "SUPER SECRET": {"a b": 1, "ok": "x"}})
        await http.delete("/admin/functions/%1b[2J")
        terminal, unfit, broken, missing = await entries(gw)
        assert (missing["status"], missing["code"], missing["target"]) == (404, "not_found", "none")
        assert (broken["status"], broken["code"], broken["fields"]) == (400, "invalid_json", {})
        assert (unfit["status"], unfit["target"]) == (422, "")
        assert unfit["fields"] == {"tenant": 1, "?.?": 1, "?.ok": 3}
        assert terminal["target"].isprintable()


async def test_the_fields_of_a_record_are_bounded() -> None:
    async with gateway() as gw, gw.http() as http:
        assets = {f"file{number}.py": "0" * 64 for number in range(3000)}
        body = {"name": "x" * 10_000, "task": "handler", "architecture": "h", "assets": assets}
        assert (await http.post("/admin/functions", json=body)).status_code == 422
        (entry,) = await entries(gw)
        assert len(entry["fields"]) == 24 and len(entry["target"]) == 256


async def test_no_change_is_made_that_cannot_be_recorded() -> None:
    state = Failing()
    async with gateway(state=state) as gw, gw.http() as http:
        await gw.add_function("coder", FunctionTask.HANDLER)
        state.begins = False
        refused = await http.delete("/admin/functions/coder")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "state_unavailable")
        assert (await http.post("/admin/keys", json={"tenant": "acme"})).status_code == 503
        assert [function.name for function in await state.functions()] == ["coder"]
        assert len(await state.keys()) == 2
        state.begins = True
        assert (await http.delete("/admin/functions/coder")).status_code == 200


async def test_a_change_without_an_outcome_stays_in_the_log() -> None:
    state = Failing()
    async with gateway(state=state) as gw, gw.http() as http:
        state.ends = False  # as if the gateway had died meanwhile
        assert (await http.post("/admin/keys", json={"tenant": "acme"})).status_code == 201
        (entry,) = await entries(gw)
        assert (entry["operation"], entry["status"], entry["ended_at"]) == ("key.create", None, None)


async def test_the_record_is_there_before_the_change() -> None:
    seen: list[str] = []

    class Watched(MemoryState):
        async def delete_function(self, name: str) -> None:
            seen.extend(one.entry.operation for one in (await self.audit_page()).records)
            await super().delete_function(name)

    async with gateway(state=Watched()) as gw, gw.http() as http:
        await gw.add_function("coder", FunctionTask.HANDLER)
        assert (await http.delete("/admin/functions/coder")).status_code == 200
    assert seen == ["function.delete"]


async def test_a_change_whose_client_leaves_has_an_outcome() -> None:
    async with gateway() as gw:
        await gw.add_function("coder", FunctionTask.HANDLER)
        started = asyncio.Event()

        async def endless(*_: object, **__: object) -> Any:
            started.set()
            await asyncio.Event().wait()
            yield None

        gw.cluster.warm = endless  # type: ignore[method-assign]
        async with gw.http() as http:
            waiting = asyncio.create_task(http.post("/admin/functions/coder/warm", json={}))
            async with asyncio.timeout(20):
                await started.wait()
            (running,) = await entries(gw)
            assert (running["operation"], running["status"]) == ("function.warm", None)
            waiting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await waiting
        async with asyncio.timeout(20):
            while (ended := (await entries(gw))[0])["status"] is None:
                pass
        assert (ended["status"], ended["code"]) == (499, "client_gone")


async def test_refused_attempts_are_counted_and_those_of_known_keys_recorded_once_a_minute() -> None:
    async with gateway() as gw:
        async with gw.http(gw.caller_key) as http:
            for _ in range(5):
                assert (await http.delete("/admin/functions/coder")).status_code == 403
            assert (await http.get("/admin/audit")).status_code == 403
        async with gw.http("hc_0000_" + "x" * 43) as http:
            for _ in range(3):
                assert (await http.delete("/admin/functions/coder")).status_code == 401
        assert await entries(gw) == []
        (entry,) = await entries(gw, log=AuditLogName.REFUSED)
        assert (entry["operation"], entry["target"]) == ("function.delete", "coder")
        assert (entry["tenant"], entry["status"], entry["code"]) == ("acme", 403, "forbidden")
        async with gw.http() as http:
            metrics = (await http.get("/metrics")).text
        assert 'hypercast_refused_changes_total{status="403"} 5.0' in metrics
        assert 'hypercast_refused_changes_total{status="401"} 3.0' in metrics


async def test_the_log_is_read_in_pages_and_by_key_operation_and_period() -> None:
    async with gateway() as gw, gw.http() as http:
        for number in range(7):
            await http.post("/admin/keys", json={"tenant": f"t{number}"})
            await http.delete("/admin/functions/none")
        names, cursor = list[str](), ""
        while True:
            params: dict[str, str | int] = {"limit": 3, "operation": "key.create", "cursor": cursor}
            page = (await http.get("/admin/audit", params=params)).json()
            names += [entry["target"] for entry in page["entries"]]
            if not (cursor := page["next"]):
                break
        assert names == [f"t{number}" for number in reversed(range(7))]
        own = (await entries(gw))[0]["key_id"]
        assert len(await entries(gw, key=own)) == 14 and await entries(gw, key="none") == []
        assert await entries(gw, until=1) == [] and len(await entries(gw, since=1)) == 14
        assert (await http.get("/admin/audit", params={"cursor": "x"})).status_code == 422
        assert (await http.get("/admin/audit", params={"limit": 1001})).status_code == 422


async def test_a_tenant_cannot_push_others_changes_out_of_the_log() -> None:
    made = new_api_key("acme", KeyRole.DEPLOYER, "ci")
    async with gateway() as gw, gw.http(made.plaintext) as http:
        await gw.state.put_key(made.key)
        statuses = [(await http.delete(f"/admin/functions/no-{n}")).status_code for n in range(150)]
        assert statuses == [404] * 120 + [429] * 30
        async with gw.http() as admin:
            for _ in range(150):
                assert (await admin.delete("/admin/functions/nope")).status_code == 404


@pytest.mark.parametrize("body", [b'{"name":"\xff"}', b'{"name":"x","scaling":{"k\xff":1}}'])
async def test_a_body_that_is_not_utf8_is_refused_as_by_any_route(body: bytes) -> None:
    async with gateway() as gw, gw.http() as http:
        refused = await http.post("/admin/functions", content=body)
        assert refused.status_code in (400, 422), refused.text
