"""Functions of tenants over real HTTP: who calls, sees and changes them, and what others learn."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx2

from registry.config.secrets import new_api_key
from registry.records.api_key import KeyRole
from registry.records.function import FunctionVersion
from tests.fixtures.deploy_drafts import draft
from tests.fixtures.gateway_http import Gateway, byte_tokenizer, gateway

CALL = {"prompt": "x", "max_tokens": 1}
CHANGES: tuple[tuple[str, str, dict[str, Any] | None], ...] = (
    ("PATCH", "", {"scaling": {"max_instances": 1}}),
    ("PATCH", "", {"access": {"visibility": "public"}}),
    ("POST", "/rollback", {}),
    ("POST", "/rollout", {"to": 1, "percent": 5}),
    ("GET", "/rollout", None),
    ("POST", "/rollout/promote", None),
    ("POST", "/rollout/abort", None),
    ("POST", "/scale", {"instances": 0, "wait": False}),
    ("POST", "/warm", {}),
    ("POST", "/drop", {"tier": "host"}),
    ("GET", "/logs", None),
    ("DELETE", "", None),
)


@dataclass
class Tenants:
    """A gateway, and clients with keys of roles and tenants, such as `acme deployer`."""

    gw: Gateway
    clients: dict[str, httpx2.AsyncClient]

    def __getitem__(self, name: str) -> httpx2.AsyncClient:
        return self.clients[name]

    async def deploy(self, client: str, name: str, weights: bytes = b"\1" * 64, **more: object) -> Any:
        files = {
            "config.json": self.gw.blobs.put(b"{}"),
            "tokenizer.json": self.gw.blobs.put(byte_tokenizer().to_str().encode()),
        }
        body = draft(self.gw, weights, name=name, assets=files, **more)
        made = await self[client].post("/admin/functions", json=body)
        await self.gw.cluster.refresh()
        return made

    async def models(self, client: str) -> list[str]:
        return [model["id"] for model in (await self[client].get("/v1/models")).json()["data"]]

    async def listed(self, client: str) -> dict[str, Any]:
        found = (await self[client].get("/admin/functions")).json()["functions"]
        return {one["name"]: one for one in found}

    async def calls(self, client: str, name: str) -> int:
        """Return the status of a call by each of its paths, which has to be the same."""
        http = self[client]
        statuses = {
            (await http.post(f"/functions/{name}/invoke", json=CALL)).status_code,
            (await http.post(f"/functions/{name}:1/invoke", json=CALL)).status_code,
            (await http.post("/v1/completions", json={"model": name, **CALL})).status_code,
            (await http.get(f"/v1/models/{name}")).status_code,
        }
        assert len(statuses) == 1, statuses
        return statuses.pop()


@asynccontextmanager
async def tenants(**functions: list[str]) -> AsyncIterator[Tenants]:
    async with gateway() as gw, AsyncExitStack() as stack:
        clients = {"admin": await stack.enter_async_context(gw.http())}
        for name in (
            *("acme deployer", "acme caller", "globex deployer", "globex caller"),
            *("initech caller", "watch viewer", "finance billing"),
        ):
            tenant, _, role = name.partition(" ")
            made = new_api_key(
                tenant, KeyRole(role), name, functions=functions.get(name.replace(" ", "_"), ())
            )
            await gw.state.put_key(made.key)
            clients[name] = await stack.enter_async_context(gw.http(made.plaintext))
        yield Tenants(gw, clients)


async def test_a_deployers_function_is_its_tenants_alone() -> None:
    async with tenants() as of:
        assert (await of.deploy("acme deployer", "secret")).status_code == 201
        for client, status in {
            "acme deployer": 200,
            "acme caller": 200,
            "admin": 200,
            "globex caller": 404,
            "globex deployer": 404,
            "watch viewer": 403,
            "finance billing": 403,
        }.items():
            assert await of.calls(client, "secret") == status, client
        assert await of.models("acme caller") == await of.models("admin") == ["secret"]
        assert await of.models("globex caller") == await of.models("globex deployer") == []
        assert await of.listed("globex deployer") == {}
        for client in ("admin", "acme deployer", "watch viewer"):
            shown = (await of.listed(client))["secret"]
            assert (shown["owner"], shown["visibility"], shown["shared_with"]) == ("acme", "private", [])
            assert shown["current"]["image"] and shown["current"]["deployed_by"]
        assert (await of["acme deployer"].get("/admin/functions/secret")).json()["history"]
        # no index of this gateway yet, only the record in the state
        of.gw.cluster.snapshot = type(of.gw.cluster.snapshot)(
            cursor="", functions=(), versions=(), nodes=(), instances=(), load_reports=()
        )
        of.gw.services.functions.remove("secret")
        assert await of.calls("globex caller", "secret") == 404
        assert await of.calls("acme caller", "secret") == 200


async def test_what_may_not_be_called_answers_as_what_does_not_exist() -> None:
    async with tenants() as of:
        await of.deploy("acme deployer", "secret")
        for client in ("globex caller", "globex deployer"):
            http = of[client]
            for method, path, body in (
                ("POST", "/functions/NAME/invoke", CALL),
                ("POST", "/functions/NAME:1/invoke", CALL),
                ("POST", "/functions/NAME:7/invoke", CALL),
                ("POST", "/v1/completions", {"model": "NAME", **CALL}),
                ("POST", "/v1/chat/completions", {"model": "NAME", "messages": []}),
                ("POST", "/v1/embeddings", {"model": "NAME", "input": "x"}),
                ("GET", "/v1/models/NAME", None),
                ("GET", "/admin/functions/NAME", None),
                *((method, f"/admin/functions/NAME{path}", body) for method, path, body in CHANGES),
            ):
                answers = []
                for name in ("secret", "absent"):
                    body_of = body if body is None or "model" not in body else {**body, "model": name}
                    answer = await http.request(method, path.replace("NAME", name), json=body_of)
                    head = {k: v for k, v in answer.headers.items() if k not in ("x-request-id", "date")}
                    head.pop("content-length", None)
                    answers.append((answer.status_code, head, answer.text.replace(name, "NAME")))
                assert answers[0] == answers[1], (client, method, path)
        assert (await of.gw.state.function("secret")).versions == (1,)


async def test_a_name_that_is_taken_says_no_more() -> None:
    async with tenants() as of:
        await of.deploy("acme deployer", "secret")
        await of.deploy("admin", "open", task="embed")
        messages = set()
        for name in ("secret", "open"):
            for more in ({}, {"image": "0" * 64}, {"task": "classify"}, {"access": {"visibility": "public"}}):
                made = await of.deploy("globex deployer", name, b"\2" * 64, **more)
                error = made.json()["error"]
                assert (made.status_code, error["code"]) == (409, "name_taken")
                messages.add(error["message"].replace(name, "NAME"))
        assert messages == {"the name 'NAME' is taken: choose another"}
        assert (await of.gw.state.function("secret")).versions == (1,)
        assert (await of.deploy("acme deployer", "secret", b"\2" * 64)).json()["version"] == 2
        assert (await of.deploy("admin", "secret", b"\3" * 64)).json()["version"] == 3
        assert (await of.listed("admin"))["secret"]["owner"] == "acme"  # kept, and who deployed is recorded


async def test_a_name_with_an_administrators_secrets_is_taken() -> None:
    async with tenants() as all_:
        secrets = "/admin/functions/reserved/secrets/TOKEN"
        assert (await all_["admin"].put(secrets, json={"value": "hidden"})).status_code == 200
        refused = await all_.deploy("acme deployer", "reserved")
        assert refused.status_code == 409 and refused.json()["error"]["code"] == "name_taken"
        assert (await all_.deploy("admin", "reserved")).status_code == 201


async def test_secrets_that_are_set_during_a_deploy_take_the_name() -> None:
    async with tenants() as all_:
        control = all_.gw.cluster
        host_copy = control.ensure_host_copy

        async def slowly(version: FunctionVersion) -> None:
            await host_copy(version)
            put = "/admin/functions/reserved/secrets/TOKEN"
            assert (await all_["admin"].put(put, json={"value": "hidden"})).status_code == 200

        control.ensure_host_copy = slowly  # type: ignore[method-assign]
        assert (await all_.deploy("acme deployer", "reserved")).status_code == 409
        control.ensure_host_copy = host_copy  # type: ignore[method-assign]
        assert (await all_["admin"].get("/admin/functions/reserved")).status_code == 404


async def test_two_tenants_that_deploy_one_name_at_once() -> None:
    async with tenants() as of:
        ensure = of.gw.cluster.ensure_host_copy

        async def meanwhile(version: Any) -> None:
            of.gw.cluster.ensure_host_copy = ensure  # type: ignore[method-assign]
            made = await of.deploy("globex deployer", "same", b"\2" * 64)
            assert made.status_code == 201
            await ensure(version)

        of.gw.cluster.ensure_host_copy = meanwhile  # type: ignore[method-assign]
        late = await of.deploy("acme deployer", "same")
        assert (late.status_code, late.json()["error"]["code"]) == (409, "name_taken")
        head = await of.gw.state.function("same")
        assert (head.access.owner, head.versions) == ("globex", (1,))


async def test_a_function_of_the_operator_is_open_as_before() -> None:
    async with tenants() as of:
        await of.deploy("admin", "open")
        for client in ("acme caller", "globex deployer", "admin"):
            assert await of.calls(client, "open") == 200
        shown = (await of.listed("admin"))["open"]
        assert (shown["owner"], shown["visibility"]) == (None, "public")
        outline = (await of["globex deployer"].get("/admin/functions/open")).json()
        assert outline["name"] == "open" and outline["owner"] is None and "history" not in outline
        current = outline["current"]
        assert current["image"] is current["manifest"] is None
        assert (current["assets"], current["deployed_by"], outline["instances"]) == ({}, "", [])
        for method, path, body in CHANGES:
            answer = await of["globex deployer"].request(method, f"/admin/functions/open{path}", json=body)
            assert (answer.status_code, answer.json()["error"]["code"]) == (403, "forbidden"), (method, path)


async def test_sharing_and_its_end() -> None:
    async with tenants() as of:
        await of.deploy("acme deployer", "model", access={"share": ["globex"]})
        assert [await of.calls(f"{one} caller", "model") for one in ("acme", "globex", "initech")] == [
            *(200, 200, 404)
        ]
        outline = (await of.listed("globex deployer"))["model"]
        assert (outline["owner"], outline["shared_with"], outline["current"]["image"]) == ("acme", [], None)

        async def change(client: str, **access: object) -> Any:
            changed = await of[client].patch("/admin/functions/model", json={"access": access})
            await of.gw.cluster.refresh()
            return changed

        changed = await change("acme deployer", share=["initech", "acme"], unshare=["globex"])
        assert changed.json()["shared_with"] == ["initech"]
        # At once on the gateway that changed it; the feed has not even reported it to the index.
        assert [await of.calls(f"{one} caller", "model") for one in ("acme", "globex", "initech")] == [
            *(200, 404, 200)
        ]
        assert (await change("globex deployer", share=["globex"])).status_code == 404
        await of.deploy("acme deployer", "model", b"\2" * 64)
        assert (await of.listed("admin"))["model"]["shared_with"] == ["initech"]  # kept by the redeploy
        assert (await change("acme deployer", visibility="public")).json()["shared_with"] == []
        assert await of.calls("globex caller", "model") == 200
        assert (await change("acme deployer", share=["globex"])).status_code == 400  # it is open to all
        assert (await change("acme deployer", visibility="private")).json()["visibility"] == "private"
        assert await of.calls("globex caller", "model") == 404
        stolen = await change("acme deployer", owner="globex")
        assert (stolen.status_code, stolen.json()["error"]["code"]) == (403, "forbidden")
        many = [f"t{number}" for number in range(256)]
        assert (await change("acme deployer", share=many)).status_code == 200
        assert (await change("acme deployer", share=["one-more"])).status_code == 422
        assert (await change("acme deployer", share=["=x"])).status_code == 422


async def test_an_admin_gives_a_function_to_a_tenant() -> None:
    async with tenants() as of:
        await of.deploy("admin", "given", access={"owner": "acme"})
        shown = (await of.listed("acme deployer"))["given"]
        assert (shown["owner"], shown["visibility"]) == ("acme", "private")
        assert await of.calls("globex caller", "given") == 404
        scaled = await of["acme deployer"].post(
            "/admin/functions/given/scale", json={"instances": 1, "wait": False}
        )
        assert scaled.status_code == 200
        moved = await of["admin"].patch("/admin/functions/given", json={"access": {"owner": "globex"}})
        await of.gw.cluster.refresh()
        assert moved.json()["owner"] == "globex"
        assert await of.calls("globex caller", "given") == 200
        assert await of.calls("acme caller", "given") == 404
        back = await of["admin"].patch("/admin/functions/given", json={"access": {"owner": None}})
        assert (back.json()["owner"], back.json()["visibility"]) == (None, "private")
        await of.deploy("admin", "named", access={"share": ["initech"]})  # the operator's, for one tenant
        assert await of.calls("initech caller", "named") == 200
        assert await of.calls("globex caller", "named") == 404


async def test_a_deployers_key_with_a_list_of_functions_has_no_others() -> None:
    async with tenants(acme_deployer=["one", "two"]) as of:
        assert (await of.deploy("acme deployer", "one")).status_code == 201
        refused = await of.deploy("acme deployer", "other")
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "forbidden")
        await of.deploy("admin", "third", access={"owner": "acme"})
        for name in ("third", "absent"):
            gone = await of["acme deployer"].delete(f"/admin/functions/{name}")
            assert gone.status_code == 403
        assert await of.models("acme deployer") == ["one"]
        assert list(await of.listed("acme deployer")) == ["one"]
        assert (await of["acme deployer"].delete("/admin/functions/one")).status_code == 200


async def test_usage_of_whom_each_role_sees() -> None:
    async with tenants() as of:
        await of.deploy("admin", "open")
        await of["acme caller"].post("/functions/open/invoke", json=CALL)
        await of["globex caller"].post("/functions/open/invoke", json=CALL)
        for client, seen in {
            "admin": ["acme", "globex"],
            "finance billing": ["acme", "globex"],
            "acme deployer": ["acme"],
            "globex caller": ["globex"],
        }.items():
            rows = (await of[client].get("/admin/usage/report")).json()["rows"]
            assert [row["tenant"] for row in rows] == seen, client
            other = await of[client].get("/admin/usage/report?tenant=initech")
            assert other.status_code == (200 if len(seen) > 1 else 403)
        for path in ("usage/check", "prices"):
            assert (await of["finance billing"].get(f"/admin/{path}")).status_code == 200
