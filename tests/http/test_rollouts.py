"""Rollouts over HTTP: their life cycle, which version answers, and copies that nobody pays but the owner."""

from collections import Counter
from dataclasses import replace

import httpx2
import msgspec
import pytest

from gateway.core.contract import DispatchError, RolloutHealth
from gateway.requests.shadows import MAX_BODY_BYTES, SHADOW_KEY
from registry.records.change import CallTraffic
from registry.records.function import FunctionTask
from registry.records.instance import InstanceState
from registry.records.rollout_changes import run_rollout
from registry.records.usage import RequestStatus
from registry.state import UsageFilter
from tests.fixtures.deploy_drafts import draft
from tests.fixtures.gateway_http import Gateway, byte_tokenizer, gateway
from tests.fixtures.patience import until
from tests.fixtures.registry_records import instance, node

ROLLOUT = "/admin/functions/tiny/rollout"
CALL = {"model": "tiny", "prompt": "hello", "max_tokens": 2}


async def deploy(gw: Gateway, http: httpx2.AsyncClient, weights: bytes, **more: object) -> int:
    files = {
        "config.json": gw.blobs.put(b"{}"),
        "tokenizer.json": gw.blobs.put(byte_tokenizer().to_str().encode()),
    }
    made = await http.post("/admin/functions", json=draft(gw, weights, assets=files, **more))
    assert made.status_code == 201, made.text
    await gw.cluster.refresh()
    return int(made.json()["version"])


async def start(gw: Gateway, version: int) -> None:
    """Give the version a ready instance, and let the controller's part be done."""
    await gw.state.put_node(node(), 60)
    await gw.state.put_instance(
        instance(f"i{version}", function="tiny", version=version, state=InstanceState.READY), 1
    )

    def step(head):  # type: ignore[no-untyped-def]
        return run_rollout(head, head.rollout.id, at=1.0)

    await gw.state.change_rollout("tiny", step)
    await refresh(gw)


async def refresh(gw: Gateway) -> None:
    await gw.cluster.refresh()
    gw.services.functions.remove("tiny")  # its index is at most 50 ms old otherwise


async def versions(http: httpx2.AsyncClient, count: int, **body: object) -> Counter[str]:
    answers = [await http.post("/v1/completions", json={**CALL, **body}) for _ in range(count)]
    assert {answer.status_code for answer in answers} == {200}
    return Counter(answer.headers["x-function-version"] for answer in answers)


async def test_a_rollout_from_its_begin_to_its_promotion() -> None:
    async with gateway() as gw, gw.http() as http:
        assert await deploy(gw, http, b"\1" * 64) == 1
        assert (await http.get(ROLLOUT)).status_code == 404
        assert await deploy(gw, http, b"\2" * 64, make_current=False) == 2
        assert (await http.get("/admin/functions/tiny")).json()["current"]["version"] == 1
        began = await http.post(ROLLOUT, json={"to": 2, "percent": 50})
        assert began.status_code == 200 and began.json()["state"] == "starting"
        assert ("ensure_host_copy", "tiny", 2) in gw.cluster.asked
        await refresh(gw)
        assert await versions(http, 10) == {"1": 10}  # no instance of it is ready
        await start(gw, 2)
        found = await versions(http, 60)
        assert 10 <= found["2"] <= 50 and found.total() == 60
        assert await versions(http, 5, model="tiny:1") == {"1": 5}
        assert await versions(http, 5, model="tiny:2") == {"2": 5}
        everything = await http.post(ROLLOUT, json={"to": 2, "percent": 100})
        assert everything.json()["state"] == "running" and everything.json()["id"] == began.json()["id"]
        await refresh(gw)
        assert await versions(http, 10) == {"2": 10}
        done = await http.post(f"{ROLLOUT}/promote")
        assert (done.json()["state"], done.json()["reason"]) == ("promoted", "by an operator")
        await refresh(gw)
        shown = (await http.get("/admin/functions/tiny")).json()
        assert shown["current"]["version"] == 2 and shown["rollout"]["state"] == "promoted"
        assert await versions(http, 5) == {"2": 5}
        assert (await http.post(f"{ROLLOUT}/abort")).status_code == 409


async def test_an_aborted_rollout_sends_nothing_more() -> None:
    async with gateway() as gw, gw.http() as http:
        await deploy(gw, http, b"\1" * 64)
        await deploy(gw, http, b"\2" * 64, make_current=False)
        await http.post(ROLLOUT, json={"to": 2, "percent": 100})
        await start(gw, 2)
        assert await versions(http, 3) == {"2": 3}
        gw.cluster.health = RolloutHealth(
            candidate=CallTraffic(requests=9, ended=8, errors=2, first_tokens=4, first_token_s=0.5), ready=1
        )
        shown = (await http.get(ROLLOUT)).json()
        assert shown["ready"] == 1 and shown["traffic"][0] == {
            "version": 2,
            "requests": 9,
            "ended": 8,
            "errors": 2,
            "ttft_ms": 125.0,
        }
        assert (await http.post(f"{ROLLOUT}/abort")).json()["state"] == "aborted"
        await refresh(gw)
        assert await versions(http, 5) == {"1": 5}


async def test_what_cannot_be_is_refused_and_changes_are_in_the_audit_log() -> None:
    async with gateway() as gw, gw.http() as http:
        await deploy(gw, http, b"\1" * 64)
        await deploy(gw, http, b"\2" * 64, make_current=False)
        await deploy(gw, http, b"\3" * 64, make_current=False)
        refused = {
            404: [{"to": 9, "percent": 1}],
            409: [{"to": 1, "percent": 1}],
            422: [{"to": 2, "percent": 101}, {"percent": 5}, {"to": 2, "steps": [50, 10]}, {"to": 2, "x": 1}],
        }
        for status, bodies in refused.items():
            for body in bodies:
                answer = await http.post(ROLLOUT, json=body)
                assert answer.status_code == status, (body, answer.text)
        assert (await http.post(f"{ROLLOUT}/promote")).status_code == 409
        await http.post(ROLLOUT, json={"to": 2, "percent": 1})
        assert (await http.post(ROLLOUT, json={"to": 3, "percent": 1})).status_code == 409
        assert (await http.post(f"{ROLLOUT}/promote")).status_code == 409  # it is starting
        blocked = await http.post("/admin/functions", json=draft(gw, b"\4" * 64))
        assert blocked.status_code == 409 and "promote or abort it first" in blocked.text
        back = await http.post("/admin/functions/tiny/rollback", json={"version": 1})
        assert back.json()["rollout"]["state"] == "aborted"
        log = (await http.get("/admin/audit")).json()["entries"]
        assert {"rollout.begin", "rollout.promote"} <= {one["operation"] for one in log}


async def test_a_wait_is_for_the_first_instance() -> None:
    async with gateway() as gw, gw.http() as http:
        await deploy(gw, http, b"\1" * 64)
        await deploy(gw, http, b"\2" * 64, make_current=False)
        await http.post(ROLLOUT, json={"to": 2, "percent": 0, "wait": True})
        assert gw.cluster.asked[-1] == ("rollout_started", "tiny")


@pytest.mark.parametrize("owner", ["", "globex"])
async def test_shadows_are_run_by_the_candidate_and_paid_by_the_owner(owner: str) -> None:
    async with gateway() as gw, gw.http() as http, gw.http(gw.caller_key) as caller:
        access = {"access": {"owner": owner, "visibility": "public"}} if owner else {}
        await deploy(gw, http, b"\1" * 64, **access)
        await deploy(gw, http, b"\2" * 64, make_current=False)
        await http.post(ROLLOUT, json={"to": 2, "percent": 0, "shadow_percent": 100})
        await start(gw, 2)
        answer = await caller.post("/v1/completions", json=CALL)
        assert answer.headers["x-function-version"] == "1"
        await until(lambda: gw.services.metrics.shadows["tiny", "ok"] == 1)  # after it was billed
        found = {one.version: one for one in (await gw.state.requests(UsageFilter()))[0]}
        original, shadow = found[1], found[2]
        assert shadow.client_request_id == original.request_id
        assert shadow.tenant == (owner or "admin") != original.tenant
        assert shadow.key_id == SHADOW_KEY and shadow.status is RequestStatus.OK
        assert (shadow.prompt_tokens, shadow.completion_tokens) == (4, 2)
        assert [call.tenant for call in gw.dispatcher.calls] == [original.tenant, shadow.tenant]
        assert (
            'hypercast_shadow_requests_total{function="tiny",outcome="ok"} 1.0'
            in (await http.get("/metrics")).text
        )


async def test_failing_shadows_change_nothing_for_the_caller_and_large_ones_are_not_made() -> None:
    async with gateway() as gw, gw.http() as http:
        await deploy(gw, http, b"\1" * 64)
        await deploy(gw, http, b"\2" * 64, make_current=False)
        await http.post(ROLLOUT, json={"to": 2, "percent": 0, "shadow_percent": 100})
        await start(gw, 2)
        script = gw.dispatcher.script

        def failing(call):  # type: ignore[no-untyped-def]
            if call.version.version == 2:
                raise DispatchError("function_error", "broken", status=500)
            return script(call)

        gw.dispatcher.script = failing
        assert await versions(http, 4) == {"1": 4}
        large = msgspec.json.encode(CALL) + b" " * MAX_BODY_BYTES
        assert (await http.post("/v1/completions", content=large)).status_code == 200
        shadows = gw.services.metrics.shadows
        await until(lambda: dict(shadows) == {("tiny", "failed"): 4, ("tiny", "dropped"): 1})


async def test_versions_of_other_tasks_do_not_stand_in() -> None:
    async with gateway() as gw, gw.http() as http:
        await gw.add_function("tiny", tokenizer=byte_tokenizer())
        known = await gw.state.version("tiny")
        other = replace(known, version=0, task=FunctionTask.EMBED, architecture="Other")
        await gw.state.create_version(other, None, becomes_current=False)
        answer = await http.post(ROLLOUT, json={"to": 2, "percent": 5})
        assert answer.status_code == 409 and "has the task embed" in answer.text
