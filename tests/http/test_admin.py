"""Keys, prices, operation, probes and bounds of the gateway's HTTP side."""

import dataclasses
import json
import re
import tomllib
from collections.abc import AsyncIterator
from pathlib import Path

import httpx2
import jsonschema
import msgspec
import numpy as np
import pytest

from gateway.api.operations import OPERATIONS
from gateway.billing.request_record import BillingFailed
from gateway.core.contract import DispatchError, Event, FunctionCall
from gateway.core.settings import RequestLimits
from gateway.fakes.dispatcher import HOT
from gateway.http.metrics import ControlFacts, Metrics
from gateway.schemas.document import document
from registry.messages.node import Array, Arrays, Compute, HandlerChunk, InvokeHandler, RequestUsage
from registry.records.change import NodeUp, Snapshot
from registry.records.function import FunctionTask
from registry.records.usage import RequestStatus
from registry.state import UsageFilter
from tests.fixtures import registry_records as records
from tests.fixtures.gateway_http import byte_tokenizer, gateway

ROOT = Path(__file__).resolve().parents[2]
NOTHING = Snapshot(cursor="", functions=(), versions=(), nodes=(), instances=(), load_reports=())
USAGE = RequestUsage(prompt_tokens=0, completion_tokens=0, gpu_us=1000, exec_us=1000)


async def test_models_are_listed_with_their_adapters() -> None:
    async with gateway() as gw, gw.http(gw.caller_key) as http:
        files = {f"lora/{name}/adapter_config.json": b"{}" for name in ("sql", "chat")}
        await gw.add_function("coder", files={**files, "lora/sql/adapter_model.safetensors": b""})
        await gw.add_function("other")
        listed = (await http.get("/v1/models")).json()["data"]
        assert [model["id"] for model in listed] == ["coder", "coder/chat", "coder/sql", "other"]


async def test_keys_roles_and_tenants() -> None:
    async with gateway() as gw, gw.http() as admin, gw.http(gw.caller_key) as caller:
        await gw.add_function("coder", tokenizer=byte_tokenizer())
        await gw.add_function("other", tokenizer=byte_tokenizer())
        body = {"tenant": "globex", "name": "ci", "functions": ["coder"], "expires_in_s": 60}
        made = (await admin.post("/admin/keys", json=body)).json()
        listed = (await admin.get("/admin/keys")).json()["keys"]
        assert made["id"] in {key["id"] for key in listed} and "digest" not in listed[0]
        assert (await caller.get("/admin/keys")).status_code == 403
        ask = {"prompt": "x", "max_tokens": 1}
        async with gw.http(made["key"]) as limited:
            done = await limited.post("/functions/coder/invoke", json=ask)
            assert done.status_code == 200
            refused = await limited.post("/functions/other/invoke", json=ask)
            assert (refused.status_code, refused.json()["error"]["code"]) == (403, "forbidden")
            assert [m["id"] for m in (await limited.get("/v1/models")).json()["data"]] == ["coder"]
            rows = (await limited.get("/admin/usage/report")).json()["rows"]
            assert [(row["tenant"], row["requests"]) for row in rows] == [("globex", 1)]
            assert (await limited.get("/admin/usage/report?tenant=acme")).status_code == 403
            request_id = done.headers["x-request-id"]
            assert (await limited.get(f"/admin/usage/show/{request_id}")).json()["tenant"] == "globex"
            assert (await caller.get(f"/admin/usage/show/{request_id}")).status_code == 404
            assert (await admin.get(f"/admin/usage/show/{request_id}")).json()["rate_id"] == "cpu-001"
            revoked = await admin.delete(f"/admin/keys/{made['id']}")
            assert revoked.json()["revoked_at"]
            assert (await limited.get("/v1/models")).status_code == 401
        assert (await admin.delete("/admin/keys/nobody")).status_code == 404
        assert (await admin.get("/admin/usage/report?since=x")).status_code == 422
        own = gw.admin_key.split("_")[1]
        refused = await admin.delete(f"/admin/keys/{own}")
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "last_admin_key")
        made = (await admin.post("/admin/keys", json={"tenant": "ops", "role": "admin"})).json()
        assert (await admin.delete(f"/admin/keys/{own}")).status_code == 200
        async with gw.http(made["key"]) as successor:
            assert (await successor.delete(f"/admin/keys/{made['id']}")).status_code == 409


async def test_a_tenants_name_is_no_formula() -> None:
    async with gateway() as gw, gw.http() as http:
        for name, status in {
            "a": 201,
            "Acme Inc. 2": 201,
            "ops@acme-1_x": 201,
            "a" * 128: 201,
            "a" * 129: 422,
            "": 422,
            '=HYPERLINK("x")': 422,
            "+1": 422,
            "-1": 422,
            "@x": 422,
            " a": 422,
            "a ": 422,
            "a\n": 422,
            "a\tb": 422,
        }.items():
            made = await http.post("/admin/keys", json={"tenant": name})
            assert made.status_code == status, name


async def test_prices() -> None:
    async with gateway() as gw, gw.http() as http:
        await gw.add_function("coder", tokenizer=byte_tokenizer())
        rate = {"id": "cpu-002", "gpu_type": "cpu", "gpu_second_nanos": 0, "prompt_mtoken_nanos": 10**9}
        assert (await http.post("/admin/prices", json=rate)).status_code == 201
        assert (await http.post("/admin/prices", json={**rate, "request_nanos": 1})).status_code == 409
        assert (await http.post("/admin/prices", json=rate | {"request_nanos": 2**52})).status_code == 422
        foreign = await http.post("/admin/prices", json=rate | {"id": "cpu-003", "currency": "EUR"})
        assert (foreign.status_code, foreign.json()["error"]["param"]) == (422, "currency")
        assert "cpu-002" in {r["id"] for r in (await http.get("/admin/prices")).json()["rates"]}
        await http.post("/v1/completions", json={"model": "coder", "prompt": "abc", "max_tokens": 1})
        rows = (await http.get("/admin/usage/report")).json()["rows"]
        assert rows[0]["cost_nanos"] == 3000


async def test_operating_the_cluster() -> None:
    async with gateway() as gw, gw.http() as http:
        await gw.add_function("coder")
        one = "/admin/functions/coder"
        scaled = await http.post(f"{one}/scale", json={"instances": 2, "on": ["n1"], "wait": False})
        assert scaled.status_code == 200
        assert (await http.post(f"{one}/drop", json={"tier": "gpu"})).status_code == 200
        warm = await http.post(f"{one}/warm", json={"nodes": 2})
        lines = [json.loads(line) for line in warm.text.splitlines()]
        assert lines[0] == {"stage": "fetch", "fraction": 0.5} and lines[-1] == {"done": True}
        pulled = [json.loads(line) for line in (await http.post(f"{one}/pull")).text.splitlines()]
        folder = {"node": "n0", "host": "h0", "version": 1, "folder": "/models/coder-1"}
        assert pulled == [*lines[:-1], folder, {"done": True}]
        assert (await http.get(f"{one}/logs?lines=5")).text == "n0 started\n"
        assert gw.cluster.asked == [
            ("scale", "coder", 2, ("n1",), False),
            ("drop", "coder", "gpu", ()),
            ("warm", "coder", 2, ()),
            ("pull", "coder", None),
            ("logs", "coder", 5, False),
        ]
        gw.cluster.failure = DispatchError("no_nodes", "no node has room", status=503)
        failed = await http.post(f"{one}/warm", json={})
        assert (failed.status_code, failed.json()["error"]["code"]) == (503, "no_nodes")
        for path, body in (("nobody/scale", {"instances": 1}), ("nobody/drop", {"tier": "gpu"})):
            assert (await http.post(f"/admin/functions/{path}", json=body)).status_code == 404
        assert (await http.post(f"{one}/scale", json={"instances": -1})).status_code == 422
        assert (await http.get("/admin/nodes")).json() == {"nodes": []}
        assert (await http.get("/admin/instances")).json() == {"instances": []}


async def test_handlers_answer_json_or_events() -> None:
    async with gateway() as gw, gw.http(gw.caller_key) as http:
        await gw.add_function("echo", FunctionTask.HANDLER)

        async def once(call: FunctionCall) -> AsyncIterator[Event]:
            assert isinstance(call.work, InvokeHandler)
            yield HOT
            yield HandlerChunk(data=call.work.body)
            yield USAGE

        async def twice(call: FunctionCall) -> AsyncIterator[Event]:
            yield HOT
            yield HandlerChunk(data=b'{"n":1}', stream=True)
            yield HandlerChunk(data=b'{"n":2}', stream=True)
            yield USAGE

        gw.dispatcher.script = once
        plain = await http.post("/functions/echo/invoke", json=["any", {"json": 1}])
        assert plain.json() == ["any", {"json": 1}] and plain.headers["x-start-kind"] == "hot"
        gw.dispatcher.script = twice
        events = await http.post("/functions/echo:1/invoke", json={})
        assert events.headers["content-type"].startswith("text/event-stream")
        assert events.text == 'data: {"n":1}\n\ndata: {"n":2}\n\ndata: [DONE]\n\n'
        gw.dispatcher.script = once
        wanted = await http.post(
            "/functions/echo/invoke", json={"a": 1}, headers={"accept": "text/event-stream"}
        )
        assert wanted.text == 'data: {"a":1}\n\ndata: [DONE]\n\n'
        assert (await http.post("/functions/echo/invoke", content=b"{")).status_code == 400
        assert (await http.get("/admin/usage/report")).json()["rows"][0]["requests"] == 3


async def test_a_handler_that_gives_no_answer_has_failed_and_costs_nothing() -> None:
    async def nothing(call: FunctionCall) -> AsyncIterator[Event]:
        yield HOT
        yield USAGE

    async with gateway() as gw, gw.http(gw.caller_key) as http:
        await gw.add_function("echo", FunctionTask.HANDLER)
        gw.dispatcher.script = nothing
        answer = await http.post("/functions/echo/invoke", json={})
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, "function_error")
        (record,), _ = await gw.state.requests(UsageFilter())
        assert (record.status, record.cost_nanos) == (RequestStatus.FAILED, 0)


async def test_classify_and_features() -> None:
    async def encode(call: FunctionCall) -> AsyncIterator[Event]:
        work = call.work
        assert isinstance(work, Compute)
        yield HOT
        name, width = ("logits", 3) if work.kind == "classify" else ("features", 2)
        count = len(work.token_ids) or 1
        values = np.arange(count * width, dtype="<f4")
        yield Arrays(arrays={name: Array(dtype="float32", shape=(count, width), data=values.tobytes())})
        yield USAGE

    async with gateway() as gw, gw.http(gw.caller_key) as http:
        processor = json.dumps(
            {"image_processor_type": "ViTImageProcessor", "size": {"height": 4, "width": 4}}
        ).encode()
        files = {"preprocessor_config.json": processor}
        labels = {"0": "cat", "1": "dog", "2": "fox"}
        await gw.add_function("vit", FunctionTask.CLASSIFY, files=files, id2label=labels)
        await gw.add_function("clip", FunctionTask.FEATURES, files=files, tokenizer=byte_tokenizer())
        gw.dispatcher.script = encode
        picture = [[[0, 128, 255]] * 5] * 6
        answer = await http.post("/functions/vit/invoke", json={"image": picture, "top_k": 2})
        found = answer.json()["labels"]
        assert [label["label"] for label in found] == ["fox", "dog"]
        assert found[0]["score"] == pytest.approx(np.exp(2) / np.exp([0, 1, 2]).sum())
        work = gw.dispatcher.works()[-1]
        assert isinstance(work, Compute) and work.pixels is not None
        assert work.pixels.shape == (1, 3, 4, 4)
        raw = await http.post(
            "/functions/vit/invoke", content=b"no image", headers={"content-type": "image/png"}
        )
        assert (raw.status_code, raw.json()["error"]["param"]) == (400, "image")
        texts = await http.post("/functions/clip/invoke", json={"text": ["a", "bc"]})
        assert texts.json() == {"features": [[0.0, 1.0], [2.0, 3.0]]}
        image = await http.post("/functions/clip/invoke", json={"image": picture})
        assert image.json() == {"features": [[0.0, 1.0]]}
        assert (await http.post("/functions/clip/invoke", json={})).status_code == 422
        wrong = await http.post("/v1/completions", json={"model": "vit", "prompt": "x"})
        assert wrong.status_code == 400


async def test_bounds_of_bodies_and_the_envelope_everywhere() -> None:
    limits = RequestLimits(body_bytes=1000, json_depth=8)
    async with gateway(limits=limits) as gw, gw.http() as http:
        await gw.add_function("coder", tokenizer=byte_tokenizer())

        async def chunks() -> AsyncIterator[bytes]:
            for _ in range(20):
                yield b" " * 100

        cases = [
            (await http.post("/v1/completions", content=b" " * 2000), 413, "too_large"),
            (await http.post("/v1/completions", content=chunks()), 413, "too_large"),
            (await http.post("/v1/completions", content=b"[" * 20), 400, "json_too_deep"),
            (await http.post("/v1/completions", content=b"{"), 400, "invalid_json"),
            (await http.get("/v1/nothing"), 404, "not_found"),
            (await http.get("/v1/completions"), 405, "method_not_allowed"),
            (await http.get("/v1/models/No%20Such"), 404, "model_not_found"),
            (await http.get("/v1/models", headers={"authorization": "Basic x"}), 401, "invalid_api_key"),
        ]
        for answer, status, code in cases:
            error = answer.json()["error"]
            assert (answer.status_code, error["code"]) == (status, code)
            assert set(error) == {"message", "type", "param", "code"}
            assert answer.headers["x-request-id"]
        async with httpx2.AsyncClient(base_url=gw.url, trust_env=False) as stranger:
            anonymous = await stranger.get("/v1/models")
            assert anonymous.status_code == 401 and anonymous.headers["www-authenticate"] == "Bearer"

        async def broken(call: FunctionCall) -> AsyncIterator[Event]:
            yield HOT
            raise ZeroDivisionError("a fault of ours")

        gw.dispatcher.script = broken
        fault = await http.post("/v1/completions", json={"model": "coder", "prompt": "x"})
        assert (fault.status_code, fault.json()["error"]["code"]) == (500, "internal")
        assert "ZeroDivision" not in fault.text
        assert gw.services.limiter.in_flight == 0


async def test_probes_and_metrics() -> None:
    async with gateway(expect_nodes=1) as gw:
        await gw.add_function("coder", tokenizer=byte_tokenizer())
        async with httpx2.AsyncClient(base_url=gw.url, trust_env=False) as http:
            index = (await http.get("/")).json()
            project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
            assert (index["service"], index["version"]) == (project["name"], project["version"])
            for name in ("openapi", "livez"):
                assert (await http.get(index[name])).status_code == 200
            waiting = await http.get("/readyz")
            assert waiting.status_code == 503 and waiting.json()["reasons"] == ["0 of 1 nodes have joined"]
            health = await http.get("/health")
            assert health.status_code == 503 and health.json()["functions"] == 1
            gw.services.health.report(alive=False)
            assert len((await http.get("/readyz")).json()["reasons"]) == 2
            gw.services.health.report(alive=True)
            await gw.openai().completions.create(model="coder", prompt="x", max_tokens=3)
            text = (await http.get("/metrics")).text
            wanted = 'hypercast_requests_total{code="200",function="coder",start_kind="hot",version="1"} 1.0'
            assert wanted in text
            for name in ("time_to_first_token_seconds", "time_per_output_token_seconds", "instances"):
                assert f"hypercast_{name}" in text


async def test_nodes_name_every_function_of_an_image_and_the_link_rate_in_force() -> None:
    async with gateway() as gw, gw.http(gw.admin_key) as http:
        gw.cluster.snapshot = dataclasses.replace(
            gw.cluster.snapshot,
            versions=(records.draft("b", version=1), records.draft("a", version=2)),
            nodes=(
                NodeUp(record=records.node("n0", link_rate_bytes_s=125_000), ttl_s=6.0),
                NodeUp(record=records.node("n1", holdings=()), ttl_s=6.0),
            ),
        )
        first, second = (await http.get("/admin/nodes")).json()["nodes"]
        assert first["tiers"] == {"gpu": ["a:2", "b:1"], "host": ["a:2", "b:1"], "disk": []}
        assert second["tiers"] == {"gpu": [], "host": [], "disk": []}
        assert (await http.get("/health")).json()["link_rate_bytes_s"] == 125_000
        gone = await http.get("/v1/models/")  # no redirect: it would lose a POST's body
        assert (gone.status_code, gone.json()["error"]["code"]) == (404, "not_found")


def test_desired_instances_are_named_by_function_and_version() -> None:
    facts = ControlFacts(failovers=0, moved=0, desired={"coder:2": 3})
    text = Metrics(lambda: NOTHING, lambda: facts).render().decode()
    assert 'hypercast_desired_instances{function="coder",version="2"} 3.0' in text


def test_a_bill_that_failed_may_be_tried_again() -> None:
    assert ("retry-after", "5") in BillingFailed("req-1").all_headers()


async def test_openapi_is_a_valid_document() -> None:
    async with gateway() as gw:
        async with httpx2.AsyncClient(base_url=gw.url, trust_env=False) as http:
            document_served = (await http.get("/openapi.json")).json()
        assert document_served == msgspec.json.decode(document(OPERATIONS))
        for schema in document_served["components"]["schemas"].values():
            jsonschema.Draft202012Validator.check_schema(schema)
        names = re.findall(r"#/components/schemas/([^\"]+)", json.dumps(document_served))
        assert set(names) <= set(document_served["components"]["schemas"])
        operations = [op for path in document_served["paths"].values() for op in path.values()]
        identifiers = [op["operationId"] for op in operations]
        assert len(identifiers) == len(set(identifiers))
        everything = {**document_served["components"], "$ref": "#/schemas/CompletionRequest"}
        good = jsonschema.Draft202012Validator(json_pointer(everything))
        good.validate({"model": "m", "prompt": [1, 2], "max_tokens": 3})
        assert not good.is_valid({"model": "m"})


def json_pointer(components: object) -> dict[str, object]:
    """Components as a schema of its own: references to `#/components/schemas` become `#/schemas`."""
    text = json.dumps(components).replace("#/components/schemas", "#/schemas")
    decoded: dict[str, object] = json.loads(text)
    return decoded
