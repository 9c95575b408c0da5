"""Deploys and uploads over HTTP: what they leave, what they refuse, what they go on with."""

import asyncio
import hashlib
from collections.abc import AsyncIterator

import pytest

from gateway.core.contract import DispatchError
from registry.records.function import FunctionVersion
from tests.fixtures.deploy_drafts import draft, manifest_of
from tests.fixtures.gateway_http import gateway
from tests.fixtures.patience import PATIENCE_S


async def test_functions_from_deploy_to_delete() -> None:
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
            "previous_version": None,
            "previous_architecture": None,
        }
        other = (await http.post("/admin/keys", json={"tenant": "ops", "role": "admin"})).json()
        async with gw.http(other["key"]) as another:
            again = await another.post("/admin/functions", json=draft(gw, first))
        assert again.json()["version"] == 1  # nothing changed, so no new version
        redeployed = (await http.post("/admin/functions", json=draft(gw, second, scaling={}))).json()
        assert (redeployed["version"], redeployed["blocks"]) == (2, 12)
        checked, loaded = (
            ("check_model", "tiny", 0),
            ("ensure_host_copy", "tiny", 0),
        )  # before it had a number
        assert gw.cluster.asked.index(checked) < gw.cluster.asked.index(loaded)
        shown = (await http.get("/admin/functions/tiny")).json()
        assert {one["deployed_by"] for one in shown["history"]} == {gw.admin_key.split("_")[1]}
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


async def test_the_policy_of_a_new_function_follows_its_task_and_settings() -> None:
    async with gateway() as gw, gw.http() as http:

        async def deployed(name: str, **changes: object) -> tuple[str, float]:
            body = {"scaling": {}, **changes, "name": name}
            made = await http.post("/admin/functions", json=draft(gw, b"\1" * 64, **body))
            assert made.status_code == 201, made.text
            scaling = (await http.get(f"/admin/functions/{name}")).json()["scaling"]
            return scaling["policy"], scaling["keep_alive_s"]

        handler = {"task": "handler", "architecture": "builtin:echo", "image": None, "manifest": None}
        assert await deployed("by-load") == ("load", 60)
        assert await deployed("echoes", **handler) == ("concurrency", 60)
        assert await deployed("few", scaling={"target_concurrency": 2}) == ("concurrency", 60)
        assert await deployed("both", scaling={"target_concurrency": 2, "policy": "load"}) == ("load", 60)
        # What a function has, a redeploy changes only where it is named.
        assert await deployed("few", scaling={"keep_alive_s": 7}) == ("concurrency", 7)
        assert await deployed("by-load", scaling={"keep_alive_s": 7}) == ("load", 7)
        assert await deployed("both", **handler, replace_task=True) == ("concurrency", 60)
        for refused in (
            await http.post("/admin/functions", json=draft(gw, b"", **handler, scaling={"policy": "load"})),
            await http.patch("/admin/functions/echoes", json={"scaling": {"policy": "load"}}),
        ):
            assert refused.status_code == 422 and "--scaling load" in refused.text
        refused = await http.patch("/admin/functions/few", json={"scaling": {"scale_down_delay_s": 1}})
        assert refused.status_code == 422 and "--scale-down-delay" in refused.text


async def test_surplus_lasts_as_long_as_a_start_unless_a_delay_is_set() -> None:
    async with gateway() as gw, gw.http() as http:

        async def scale_down(name: str) -> tuple[str, float]:
            scaling = (await http.get(f"/admin/functions/{name}")).json()["scaling"]
            return scaling["scale_down"], scaling["scale_down_delay_s"]

        for name, given in (("usual", {}), ("delayed", {"scale_down_delay_s": 0.5})):
            body = draft(gw, b"\1" * 64, name=name, scaling=given)
            assert (await http.post("/admin/functions", json=body)).status_code == 201
        assert await scale_down("usual") == ("start", 2.0)
        assert await scale_down("delayed") == ("delay", 0.5)
        for given, expected in (
            ({"keep_alive_s": 7}, ("delay", 0.5)),
            ({"scale_down": "start"}, ("start", 0.5)),
            ({"scale_down_delay_s": 3}, ("delay", 3.0)),
            ({"scale_down": "start", "scale_down_delay_s": 4}, ("start", 4.0)),
        ):
            assert (await http.patch("/admin/functions/delayed", json={"scaling": given})).status_code == 200
            assert await scale_down("delayed") == expected


async def test_a_deploy_that_cannot_be_loaded_leaves_nothing() -> None:
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


async def test_deploys_at_once_are_numbered_as_they_become_current() -> None:
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


async def test_the_pin_of_a_deploy_ends_with_it() -> None:
    async with gateway() as gw, gw.http() as http:
        for _ in range(2):
            body = draft(gw, b"\1" * 64)
            digests = [body["image"], body["manifest"], *body["assets"].values()]  # type: ignore[attr-defined]
            await http.post("/admin/blobs/missing", json={"digests": digests})
            await http.post("/admin/functions", json=body)
        gone = await http.delete("/admin/functions/tiny")
        assert gone.json()["collected"] == 3 and await gw.blobs.digests() == []


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
async def test_bad_deploys(changes: dict[str, object], status: int) -> None:
    async with gateway() as gw, gw.http() as http:
        answer = await http.post("/admin/functions", json=draft(gw, b"\1" * 64, **changes))
        assert answer.status_code == status, answer.text
        assert answer.json()["error"]["code"]
        assert not await gw.state.functions()


async def test_deleting_keeps_what_others_use_or_a_deploy_counts_on() -> None:
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
        assert await gw.collector.sweep() == []  # unused for too short a time


async def test_what_nobody_went_on_with_is_swept() -> None:
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
        swept = await gw.collector.sweep()
        assert sorted(swept) == sorted(hashlib.sha256(gone).hexdigest() for gone in (b"old", b"oldold"))
        assert await gw.collector.sweep() == []


async def one(chunk: bytes) -> AsyncIterator[bytes]:
    yield chunk


async def test_upload_resumes_where_it_was_cut() -> None:
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


async def test_bad_uploads() -> None:
    async with gateway() as gw, gw.http() as http:
        good = {"upload-offset": "0", "upload-length": "3"}
        digest = hashlib.sha256(b"abc").hexdigest()
        corrupt = await http.patch(f"/admin/blobs/{digest}", content=b"abd", headers=good)
        assert (corrupt.status_code, corrupt.json()["error"]["code"]) == (422, "corrupt_image")
        assert (await http.patch("/admin/blobs/xyz", content=b"", headers=good)).status_code == 422
        bare = await http.patch(f"/admin/blobs/{digest}", content=b"abc")
        assert (bare.status_code, bare.json()["error"]["param"]) == (400, "upload-offset")
