"""Every route with a key of every role, over real HTTP: the whole matrix, and what each role sees."""

from contextlib import AsyncExitStack

import pytest

from gateway.api.operations import OPERATIONS
from gateway.core.rights import RIGHTS, Right
from registry.config.secrets import new_api_key
from registry.records.api_key import KeyRole
from tests.fixtures.gateway_http import gateway

# The roles that may use a route, by their first letters: admin, deployer, viewer, billing, caller. Written
# down apart from the operations, so that each new route is a decision.
MATRIX = {
    "POST /v1/chat/completions": "adc",
    "POST /v1/completions": "adc",
    "POST /v1/embeddings": "adc",
    "POST /v1/responses": "adc",
    "POST /v1/messages": "adc",
    "POST /v1/messages/count_tokens": "adc",
    "POST /v1/rerank": "adc",
    "POST /tokenize": "adc",
    "POST /detokenize": "adc",
    "GET /v2/models/{model}": "adc",
    "GET /v2/models/{model}/ready": "adc",
    "POST /v2/models/{model}/infer": "adc",
    "GET /v2/models/{model}/versions/{version}": "adc",
    "GET /v2/models/{model}/versions/{version}/ready": "adc",
    "POST /v2/models/{model}/versions/{version}/infer": "adc",
    "POST /v1/quote": "adc",
    "GET /v1/models": "adc",
    "GET /v1/models/{model}": "adc",
    "POST /functions/{function}/invoke": "adc",
    "POST /predictions": "adc",
    "GET /predictions": "adc",
    "GET /predictions/{prediction}": "adc",
    "PUT /predictions/{prediction}": "adc",
    "POST /predictions/{prediction}/cancel": "adc",
    "GET /webhooks/secret": "adc",
    "POST /v1/files": "adc",
    "GET /v1/files": "adc",
    "GET /v1/files/{file}": "adc",
    "GET /v1/files/{file}/content": "adc",
    "DELETE /v1/files/{file}": "adc",
    "POST /v1/batches": "adc",
    "GET /v1/batches": "adc",
    "GET /v1/batches/{batch}": "adc",
    "POST /v1/batches/{batch}/cancel": "adc",
    "POST /admin/functions": "ad",
    "GET /admin/functions": "adv",
    "GET /admin/functions/{name}": "adv",
    "PATCH /admin/functions/{name}": "ad",
    "DELETE /admin/functions/{name}": "ad",
    "POST /admin/functions/{name}/rollback": "ad",
    "POST /admin/functions/{name}/rollout": "ad",
    "GET /admin/functions/{name}/rollout": "ad",
    "POST /admin/functions/{name}/rollout/promote": "ad",
    "POST /admin/functions/{name}/rollout/abort": "ad",
    "POST /admin/functions/{name}/scale": "ad",
    "POST /admin/functions/{name}/warm": "ad",
    "POST /admin/functions/{name}/pull": "a",
    "POST /admin/functions/{name}/drop": "ad",
    "GET /admin/functions/{name}/logs": "ad",
    "GET /admin/functions/{name}/secrets": "a",
    "PUT /admin/functions/{name}/secrets/{key}": "a",
    "DELETE /admin/functions/{name}/secrets/{key}": "a",
    "POST /admin/secrets/reencrypt": "a",
    "POST /admin/blobs/missing": "ad",
    "GET /admin/blobs/{digest}": "ad",
    "HEAD /admin/blobs/{digest}": "ad",
    "PATCH /admin/blobs/{digest}": "ad",
    "GET /admin/nodes": "av",
    "POST /admin/nodes/{node}/cordon": "a",
    "POST /admin/nodes/{node}/uncordon": "a",
    "POST /admin/nodes/{node}/drain": "a",
    "GET /admin/instances": "av",
    "GET /admin/casts": "av",
    "GET /admin/watch": "adv",
    "GET /admin/me": "advbc",
    "GET /admin/keys": "a",
    "POST /admin/keys": "a",
    "PATCH /admin/keys/{key_id}": "a",
    "POST /admin/keys/{key_id}/rotate": "a",
    "DELETE /admin/keys/{key_id}": "a",
    "GET /admin/prices": "ab",
    "POST /admin/prices": "a",
    "GET /admin/usage/report": "adbc",
    "GET /admin/usage/summary": "adbc",
    "GET /admin/usage/gpu-time": "adbc",
    "GET /admin/usage/check": "ab",
    "GET /admin/usage/show/{request_id}": "adbc",
    "GET /admin/usage/export": "adbc",
    "GET /admin/usage/archive": "ab",
    "POST /admin/usage/archive": "a",
    "POST /admin/usage/delete": "a",
    "GET /admin/audit": "a",
}
OPEN = {
    f"GET {path}"
    for path in (
        *("/", "/ui", "/ui/{file}", "/livez", "/readyz", "/health", "/metrics", "/openapi.json"),
        *("/v2", "/v2/health/live", "/v2/health/ready"),
    )
}
ENDS = {"once": "true"}  # the stream of what changes, after its first event
ROUTES = {f"{op.method.upper()} {op.path}": op for op in OPERATIONS}


def test_every_route_declares_a_right() -> None:
    for route, op in ROUTES.items():
        assert isinstance(op.needs, Right), route
        assert (op.needs is Right.NONE) == (route in OPEN), route
        assert route in OPEN or route in MATRIX, f"{route}: add the roles that may use it to the matrix"
    assert set(MATRIX) <= set(ROUTES)
    assert set(RIGHTS) == set(KeyRole) and all(Right.KEY in rights for rights in RIGHTS.values())


async def test_every_route_with_every_role() -> None:
    async with gateway() as gw, AsyncExitStack() as stack:
        clients = {}
        for role in KeyRole:
            made = new_api_key("acme", role, role.value)
            await gw.state.put_key(made.key)
            clients[role] = await stack.enter_async_context(gw.http(made.plaintext))
        nobody = await stack.enter_async_context(gw.http("hc_0123456789abcdef_" + "x" * 43))
        for route, op in ROUTES.items():
            path = op.path.replace("{", "no-").replace("}", "")
            for role, http in clients.items():
                answer = await http.request(op.method, path, params=ENDS)
                allowed = route in OPEN or role.value[0] in MATRIX[route]
                assert (answer.status_code != 403) == allowed, (route, role, answer.text)
                assert answer.status_code not in (401, 500), (route, role)
                if not allowed and op.method != "head":
                    error = answer.json()["error"]  # each protocol has a form of its own
                    message = error if isinstance(error, str) else error["message"]
                    assert f"role {role.value!r}" in message
                    if not isinstance(error, str) and "code" in error:
                        assert error["code"] == "forbidden"
            answer = await nobody.request(op.method, path)
            assert (answer.status_code == 401) == (route not in OPEN), route
        for role, http in clients.items():  # paths that do not exist
            assert (await http.get("/nowhere")).status_code == 404
            assert (await http.get("/admin/nowhere")).status_code == (404 if role is KeyRole.ADMIN else 403)


@pytest.mark.parametrize("role", KeyRole)
async def test_keys_of_every_role_are_made_over_http(role: KeyRole) -> None:
    async with gateway() as gw, gw.http() as admin:
        made = await admin.post("/admin/keys", json={"tenant": "acme", "role": role.value})
        assert (made.status_code, made.json()["role"]) == (201, role.value)
        assert (await admin.post("/admin/keys", json={"tenant": "a", "role": "root"})).status_code == 422
        async with gw.http(made.json()["key"]) as http:
            answer = await http.get("/v1/models")
            assert (answer.status_code == 200) == (role.value[0] in MATRIX["GET /v1/models"])
