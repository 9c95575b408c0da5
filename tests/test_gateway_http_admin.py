"""The admin API, uploads, probes and bounds of the gateway's HTTP side."""

import asyncio
import dataclasses
import hashlib
import json
import re
from collections.abc import AsyncIterator

import httpx2
import jsonschema
import msgspec
import numpy as np
import pytest

from gateway.app import make_routes
from gateway.billing import BillingFailed
from gateway.contract import Call, DispatchError, Event
from gateway.fakes import HOT
from gateway.metrics import ControlFacts, Metrics
from gateway.openapi import OPERATIONS, document
from gateway.settings import RequestLimits
from registry.change import NodeUp, Snapshot
from registry.function import FunctionVersion, Task
from registry.images.codec import encode_manifest
from registry.images.manifest import UNIT_BYTES, LayerSpan, Manifest, TensorEntry
from registry.images.verify import CHECKSUM_BYTES
from registry.messages import Array, Arrays, Compute, HandlerChunk, InvokeHandler, Usage
from tests import registry_records as records
from tests.gateway_http_fixture import Gateway, byte_tokenizer, gateway
from tests.patience import PATIENCE_S

NOTHING = Snapshot(cursor="", functions=(), versions=(), nodes=(), instances=(), demands=())
USAGE = Usage(prompt_tokens=0, completion_tokens=0, gpu_us=1000, queue_us=0, exec_us=1000)


def manifest_of(image: bytes, architecture: str = "LlamaForCausalLM") -> bytes:
    units = -(-len(image) // UNIT_BYTES)
    return encode_manifest(
        Manifest(
            format=1,
            architecture=architecture,
            model_type="llama",
            tied_head=False,
            num_layers=1,
            nbytes=len(image),
            sha256=hashlib.sha256(image).hexdigest(),
            tensors=(
                TensorEntry(name="w", dtype="F32", shape=(len(image) // 4,), offset=0, nbytes=len(image)),
            ),
            layers=(LayerSpan(kind="layer", index=0, tower="", start=0, end=len(image)),),
            units=b"\0" * (CHECKSUM_BYTES * units),
        )
    )


def draft(gw: Gateway, image: bytes, /, **changes: object) -> dict[str, object]:
    """A deploy's body, its blobs in the store."""
    return {
        "name": "tiny",
        "task": "generate",
        "architecture": "LlamaForCausalLM",
        "image": gw.blobs.put(image),
        "manifest": gw.blobs.put(manifest_of(image)),
        "assets": {"config.json": gw.blobs.put(b"{}")},
        "dtype": "float32",
        "context_length": 64,
        "scaling": {"keep_alive_s": 5},
        **changes,
    }


def test_functions_from_deploy_to_delete() -> None:
    async def main() -> None:
        async with gateway() as gw, gw.http() as http:
            first, second = b"\1" * 4096, b"\2" * (3 << 20)
            made = await http.post("/admin/functions", json=draft(gw, first))
            assert made.status_code == 201
            assert made.json() == {
                "name": "tiny",
                "version": 1,
                "image": hashlib.sha256(first).hexdigest(),
                "bytes": 4096,
                "blocks": 1,
            }
            again = await http.post("/admin/functions", json=draft(gw, first))
            assert again.json()["version"] == 1  # nothing changed, so no new version
            redeployed = (await http.post("/admin/functions", json=draft(gw, second, scaling={}))).json()
            assert (redeployed["version"], redeployed["blocks"]) == (2, 12)
            assert ("ensure_host_copy", "tiny", 0) in gw.cluster.asked  # before it had a number
            shown = (await http.get("/admin/functions/tiny")).json()
            assert shown["current"]["version"] == 2 and shown["versions"] == [1, 2]
            assert shown["scaling"]["keep_alive_s"] == 5  # kept by the redeploy
            assert [f["name"] for f in (await http.get("/admin/functions")).json()["functions"]] == ["tiny"]
            changed = await http.patch("/admin/functions/tiny", json={"scaling": {"max_instances": 2}})
            assert changed.json()["scaling"]["max_instances"] == 2
            back = await http.post("/admin/functions/tiny/rollback", json={})
            assert back.json()["current"]["version"] == 1
            assert (await http.post("/admin/functions/tiny/rollback", json={})).status_code == 400
            gone = await http.delete("/admin/functions/tiny")
            assert gone.json()["name"] == "tiny" and not gw.cluster.snapshot.functions[1:]
            assert (await http.get("/admin/functions/tiny")).status_code == 404
            assert (await http.delete("/admin/functions/tiny")).status_code == 404
            assert await gw.blobs.digests() == []

    asyncio.run(main())


def test_a_deploy_that_cannot_be_loaded_leaves_nothing() -> None:
    async def main() -> None:
        async with gateway() as gw, gw.http() as http:
            no_room = DispatchError("start_failed", "log: no room", status=503)
            gw.cluster.failure = no_room
            failed = await http.post("/admin/functions", json=draft(gw, b"\1" * 64))
            assert failed.status_code == 503 and "no room" in failed.json()["error"]["message"]
            assert (await http.get("/admin/functions")).json()["functions"] == []
            gw.cluster.failure = None
            await http.post("/admin/functions", json=draft(gw, b"\1" * 64))
            gw.cluster.failure = no_room
            assert (await http.post("/admin/functions", json=draft(gw, b"\2" * 64))).status_code == 503
            assert (await gw.state.function("tiny")).versions == (1,)
            gw.cluster.failure = None
            assert (await http.post("/admin/functions", json=draft(gw, b"\3" * 64))).json()["version"] == 2
            back = await http.post("/admin/functions/tiny/rollback", json={})
            assert back.json()["current"]["version"] == 1

    asyncio.run(main())


def test_deploys_at_once_are_numbered_as_they_become_current() -> None:
    async def main() -> None:
        async with gateway() as gw, gw.http() as http:
            slow, fast = b"\1" * 64, b"\2" * 64
            going, go = asyncio.Event(), asyncio.Event()
            ensure = gw.cluster.ensure_host_copy

            async def held(version: FunctionVersion) -> None:
                if version.image == hashlib.sha256(slow).hexdigest():
                    going.set()
                    await go.wait()
                await ensure(version)

            gw.cluster.ensure_host_copy = held  # type: ignore[method-assign]
            first = asyncio.create_task(http.post("/admin/functions", json=draft(gw, slow)))
            await going.wait()
            second = await http.post("/admin/functions", json=draft(gw, fast))
            assert second.json()["version"] == 1 == (await gw.state.function("tiny")).current
            go.set()
            assert (await first).json()["version"] == 2 == (await gw.state.function("tiny")).current

    asyncio.run(main())


def test_the_pin_of_a_deploy_ends_with_it() -> None:
    async def main() -> None:
        async with gateway() as gw, gw.http() as http:
            for _ in range(2):
                body = draft(gw, b"\1" * 64)
                digests = [body["image"], body["manifest"], *body["assets"].values()]  # type: ignore[attr-defined]
                await http.post("/admin/blobs/missing", json={"digests": digests})
                await http.post("/admin/functions", json=body)
            gone = await http.delete("/admin/functions/tiny")
            assert gone.json()["collected"] == 3 and await gw.blobs.digests() == []

    asyncio.run(main())


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({"name": "Bad_Name"}, 422),
        ({"image": "0" * 64}, 422),
        ({"manifest": "0" * 64}, 400),
        ({"architecture": "Other"}, 422),
        ({"assets": {}}, 422),
        ({"assets": {"config.json": "1" * 64}}, 400),
        ({"assets": {"../config.json": "1" * 64, "config.json": "1" * 64}}, 422),
        ({"task": "fly"}, 422),
        ({"scaling": {"min_instances": 3, "max_instances": 1}}, 422),
        ({"unknown": 1}, 422),
        ({"image": None}, 422),
    ],
)
def test_bad_deploys(changes: dict[str, object], status: int) -> None:
    async def main() -> None:
        async with gateway() as gw, gw.http() as http:
            answer = await http.post("/admin/functions", json=draft(gw, b"\1" * 64, **changes))
            assert answer.status_code == status, answer.text
            assert answer.json()["error"]["code"]
            assert not await gw.state.functions()

    asyncio.run(main())


def test_deleting_keeps_what_others_use_or_a_deploy_counts_on() -> None:
    async def main() -> None:
        async with gateway() as gw, gw.http() as http:
            shared, own = b"\1" * 64, b"\2" * 64
            await http.post("/admin/functions", json=draft(gw, shared))
            await http.post("/admin/functions", json=draft(gw, own))
            await http.post("/admin/functions", json=draft(gw, shared, name="other"))
            counted = gw.blobs.put(own)
            asked = await http.post("/admin/blobs/missing", json={"digests": [counted, "f" * 64]})
            assert asked.json() == {"missing": ["f" * 64]}
            await http.delete("/admin/functions/tiny")
            left = set(await gw.blobs.digests())
            assert hashlib.sha256(shared).hexdigest() in left and counted in left
            assert hashlib.sha256(manifest_of(own)).hexdigest() not in left
            assert await gw.keeper.sweep() == []  # unused for too short a time

    asyncio.run(main())


def test_what_nobody_went_on_with_is_swept() -> None:
    async def main() -> None:
        async with gateway() as gw, gw.http() as http:
            now = gw.services.clock.wall_s()
            for content, age_s in ((b"young", 60), (b"old", 7200), (b"unknown", None)):
                digest = hashlib.sha256(content).hexdigest()
                await gw.blobs.append(digest, 0, one(content[:2]), total=len(content))
                blob = gw.blobs.put(content * 2)
                gw.blobs.used_at |= dict.fromkeys((digest, blob), age_s and now - age_s)
            used = draft(gw, b"\1" * 64)
            await http.post("/admin/functions", json=used)
            gw.blobs.used_at[str(used["image"])] = now - 7200
            asked = gw.blobs.put(b"asked")
            gw.blobs.used_at[asked] = now - 7200
            await http.post("/admin/blobs/missing", json={"digests": [asked]})
            swept = await gw.keeper.sweep()
            assert sorted(swept) == sorted(hashlib.sha256(gone).hexdigest() for gone in (b"old", b"oldold"))
            assert await gw.keeper.sweep() == []

    asyncio.run(main())


async def one(chunk: bytes) -> AsyncIterator[bytes]:
    yield chunk


def test_upload_resumes_where_it_was_cut() -> None:
    async def main() -> None:
        async with gateway() as gw, gw.http() as http:
            data = bytes(range(256)) * 512
            digest = hashlib.sha256(data).hexdigest()
            path = f"/admin/blobs/{digest}"
            nothing = await http.head(path)
            assert (nothing.status_code, nothing.headers["upload-offset"]) == (200, "0")
            # A client that announces more than it sends, then goes.
            _, writer = await asyncio.open_connection("127.0.0.1", gw.server.port)
            head = (
                f"PATCH {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {gw.admin_key}\r\n"
                f"upload-offset: 0\r\nupload-length: {len(data)}\r\ncontent-length: {len(data)}\r\n\r\n"
            )
            writer.write(head.encode() + data[:70_000])
            await writer.drain()
            writer.close()
            async with asyncio.timeout(PATIENCE_S):
                await gw.blobs.appended.wait()
            offset = int((await http.head(path)).headers["upload-offset"])
            assert 0 < offset <= 70_000
            wrong = await http.patch(
                path, content=b"x", headers={"upload-offset": "1", "upload-length": str(len(data))}
            )
            assert wrong.status_code == 409 and wrong.headers["upload-offset"] == str(offset)

            async def rest() -> AsyncIterator[bytes]:
                yield data[offset:100_000]
                yield data[100_000:]

            headers = {"upload-offset": str(offset), "upload-length": str(len(data))}
            done = await http.patch(path, content=rest(), headers=headers)
            assert done.json() == {"digest": digest, "offset": len(data), "complete": True}
            found = await http.get(path)
            assert found.headers["upload-complete"] == "?1" and found.json()["size"] == len(data)
            assert gw.blobs.blobs[digest] == data

    asyncio.run(main())


def test_bad_uploads() -> None:
    async def main() -> None:
        async with gateway() as gw, gw.http() as http:
            good = {"upload-offset": "0", "upload-length": "3"}
            digest = hashlib.sha256(b"abc").hexdigest()
            corrupt = await http.patch(f"/admin/blobs/{digest}", content=b"abd", headers=good)
            assert (corrupt.status_code, corrupt.json()["error"]["code"]) == (422, "corrupt_image")
            assert (await http.patch("/admin/blobs/xyz", content=b"", headers=good)).status_code == 422
            bare = await http.patch(f"/admin/blobs/{digest}", content=b"abc")
            assert (bare.status_code, bare.json()["error"]["param"]) == (400, "upload-offset")

    asyncio.run(main())


def test_keys_roles_and_tenants() -> None:
    async def main() -> None:
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

    asyncio.run(main())


def test_a_tenants_name_is_no_formula() -> None:
    async def main() -> None:
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

    asyncio.run(main())


def test_prices() -> None:
    async def main() -> None:
        async with gateway() as gw, gw.http() as http:
            await gw.add_function("coder", tokenizer=byte_tokenizer())
            rate = {"id": "cpu-002", "gpu_type": "cpu", "gpu_second_nanos": 0, "prompt_mtoken_nanos": 10**9}
            assert (await http.post("/admin/prices", json=rate)).status_code == 201
            assert (await http.post("/admin/prices", json={**rate, "request_nanos": 1})).status_code == 409
            assert (await http.post("/admin/prices", json=rate | {"request_nanos": 2**52})).status_code == 422
            assert "cpu-002" in {r["id"] for r in (await http.get("/admin/prices")).json()["rates"]}
            await http.post("/v1/completions", json={"model": "coder", "prompt": "abc", "max_tokens": 1})
            rows = (await http.get("/admin/usage/report")).json()["rows"]
            assert rows[0]["cost_nanos"] == 3000

    asyncio.run(main())


def test_operating_the_cluster() -> None:
    async def main() -> None:
        async with gateway() as gw, gw.http() as http:
            await gw.add_function("coder")
            one = "/admin/functions/coder"
            scaled = await http.post(f"{one}/scale", json={"instances": 2, "on": ["n1"], "wait": False})
            assert scaled.status_code == 200
            assert (await http.post(f"{one}/drop", json={"tier": "gpu"})).status_code == 200
            warm = await http.post(f"{one}/warm", json={"nodes": 2})
            lines = [json.loads(line) for line in warm.text.splitlines()]
            assert lines[0] == {"stage": "fetch", "fraction": 0.5} and lines[-1] == {"done": True}
            assert (await http.get(f"{one}/logs?lines=5")).text == "n0 started\n"
            assert gw.cluster.asked == [
                ("scale", "coder", 2, ("n1",), False),
                ("drop", "coder", "gpu", ()),
                ("warm", "coder", 2, ()),
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

    asyncio.run(main())


def test_handlers_answer_json_or_events() -> None:
    async def main() -> None:
        async with gateway() as gw, gw.http(gw.caller_key) as http:
            await gw.add_function("echo", Task.HANDLER)

            async def once(call: Call) -> AsyncIterator[Event]:
                assert isinstance(call.work, InvokeHandler)
                yield HOT
                yield HandlerChunk(data=call.work.body)
                yield USAGE

            async def twice(call: Call) -> AsyncIterator[Event]:
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

    asyncio.run(main())


def test_classify_and_features() -> None:
    async def encode(call: Call) -> AsyncIterator[Event]:
        work = call.work
        assert isinstance(work, Compute)
        yield HOT
        name, width = ("logits", 3) if work.kind == "classify" else ("features", 2)
        count = len(work.token_ids) or 1
        values = np.arange(count * width, dtype="<f4")
        yield Arrays(arrays={name: Array(dtype="float32", shape=(count, width), data=values.tobytes())})
        yield USAGE

    async def main() -> None:
        async with gateway() as gw, gw.http(gw.caller_key) as http:
            processor = json.dumps(
                {"image_processor_type": "ViTImageProcessor", "size": {"height": 4, "width": 4}}
            ).encode()
            files = {"preprocessor_config.json": processor}
            labels = {"0": "cat", "1": "dog", "2": "fox"}
            await gw.add_function("vit", Task.CLASSIFY, files=files, id2label=labels)
            await gw.add_function("clip", Task.FEATURES, files=files, tokenizer=byte_tokenizer())
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

    asyncio.run(main())


def test_bounds_of_bodies_and_the_envelope_everywhere() -> None:
    async def main() -> None:
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

            async def broken(call: Call) -> AsyncIterator[Event]:
                yield HOT
                raise ZeroDivisionError("a fault of ours")

            gw.dispatcher.script = broken
            fault = await http.post("/v1/completions", json={"model": "coder", "prompt": "x"})
            assert (fault.status_code, fault.json()["error"]["code"]) == (500, "internal")
            assert "ZeroDivision" not in fault.text
            assert gw.services.gate.in_flight == 0

    asyncio.run(main())


def test_probes_and_metrics() -> None:
    async def main() -> None:
        async with gateway(expect_nodes=1) as gw:
            await gw.add_function("coder", tokenizer=byte_tokenizer())
            async with httpx2.AsyncClient(base_url=gw.url, trust_env=False) as http:
                assert (await http.get("/livez")).status_code == 200
                waiting = await http.get("/readyz")
                assert waiting.status_code == 503 and waiting.json()["reasons"] == [
                    "0 of 1 nodes have joined"
                ]
                health = await http.get("/health")
                assert health.status_code == 503 and health.json()["functions"] == 1
                gw.services.pulse.note(alive=False)
                assert len((await http.get("/readyz")).json()["reasons"]) == 2
                gw.services.pulse.note(alive=True)
                await gw.openai().completions.create(model="coder", prompt="x", max_tokens=3)
                text = (await http.get("/metrics")).text
                wanted = (
                    'hypercast_requests_total{code="200",function="coder",start_kind="hot",version="1"} 1.0'
                )
                assert wanted in text
                for name in ("time_to_first_token_seconds", "time_per_output_token_seconds", "instances"):
                    assert f"hypercast_{name}" in text

    asyncio.run(main())


def test_nodes_name_every_function_of_an_image_and_the_link_rate_in_force() -> None:
    async def main() -> None:
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

    asyncio.run(main())


def test_desired_instances_are_told_by_function_and_version() -> None:
    facts = ControlFacts(failovers=0, desired={"coder:2": 3})
    text = Metrics(lambda: NOTHING, lambda: facts).render().decode()
    assert 'hypercast_desired_instances{function="coder",version="2"} 3.0' in text


def test_a_bill_that_failed_may_be_tried_again() -> None:
    assert ("retry-after", "5") in BillingFailed("req-1").all_headers()


def test_openapi_describes_every_route() -> None:
    async def main() -> None:
        async with gateway() as gw:
            described = {(op.method.upper(), op.path) for op in OPERATIONS}
            served = {
                (method, route.path)
                for route in make_routes(gw.services, gw.keeper)
                for method in route.methods or ()
            }
            implied = {("HEAD", path) for method, path in served if method == "GET"}
            assert described <= served and served - implied <= described
            async with httpx2.AsyncClient(base_url=gw.url, trust_env=False) as http:
                document_served = (await http.get("/openapi.json")).json()
            assert document_served == msgspec.json.decode(document())
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

    asyncio.run(main())


def json_pointer(components: object) -> dict[str, object]:
    """Components as a schema of its own: references to `#/components/schemas` become `#/schemas`."""
    text = json.dumps(components).replace("#/components/schemas", "#/schemas")
    decoded: dict[str, object] = json.loads(text)
    return decoded
