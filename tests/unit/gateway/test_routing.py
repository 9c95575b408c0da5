"""The router: paths and methods of the table, and the errors of those that it lacks."""

from typing import Any, cast

import pytest
from starlette.requests import Request

from gateway.api.app import make_handlers
from gateway.api.blob_collector import BlobCollector
from gateway.api.operations import OPERATIONS
from gateway.core.errors import ApiError
from gateway.core.rights import Right
from gateway.requests.routing import Endpoint, Router
from gateway.requests.services import Services

HANDLERS = make_handlers(cast(Services, None), cast(BlobCollector, None))
ROUTER = Router(OPERATIONS, HANDLERS)


def find(method: str, path: str) -> tuple[Endpoint, dict[str, Any]]:
    scope: dict[str, Any] = {"type": "http", "method": method, "path": path}
    return ROUTER.find(scope), scope.get("path_params", {})


async def error_of(method: str, path: str) -> ApiError:
    endpoint, _ = find(method, path)
    with pytest.raises(ApiError) as caught:
        await endpoint.handler(cast(Request, None))
    return caught.value


def test_every_operation_is_found_by_its_path() -> None:
    for op in OPERATIONS:
        path = op.path.replace("{", "").replace("}", "")
        endpoint, parameters = find(op.method.upper(), path)
        assert endpoint.handler == op.handler(HANDLERS) and endpoint.needs is op.needs
        assert list(parameters) == [one.name for one in op.parameters if one.place == "path"]
        assert all(name == value for name, value in parameters.items())


def test_a_fixed_path_goes_before_a_parameter() -> None:
    assert find("POST", "/admin/blobs/missing")[0].handler == HANDLERS.blobs.missing
    assert find("GET", "/admin/blobs/abc") == (find("GET", "/admin/blobs/abc")[0], {"digest": "abc"})


def test_head_is_served_by_get() -> None:
    assert find("HEAD", "/livez")[0] is find("GET", "/livez")[0]


@pytest.mark.parametrize(
    ("method", "path", "suggested"),
    [
        ("POST", "/chat/completions", "/v1/chat/completions"),
        ("POST", "/v1/completions/", "/v1/completions"),
        ("POST", "/v1/chat/completion", "/v1/chat/completions"),
        ("GET", "/models", "/v1/models"),
        ("POST", "/messages", "/v1/messages"),
        ("POST", "/v1/response", "/v1/responses"),
        ("GET", "/admin/node", "/admin/nodes"),
        ("POST", "/v1/v1/completions", "/v1/completions"),
        ("GET", "/v1/completions/", "/v1/completions"),
    ],
)
async def test_an_unknown_path_is_answered_with_the_nearest(method: str, path: str, suggested: str) -> None:
    error = await error_of(method, path)
    assert (error.status, error.code) == (404, "not_found")
    assert error.message == f"there is no endpoint {path!r}: did you mean {suggested}?"


@pytest.mark.parametrize(
    "path",
    ["/zzz", "/audio", "/v1/audio/speech", "/v1/fine_tuning", "/v1/moderations", "/pooling", "/training"],
)
async def test_a_path_like_none_has_no_suggestion(path: str) -> None:
    message = f"there is no endpoint {path!r}; /openapi.json lists all of them"
    assert (await error_of("POST", path)).message == message


async def test_a_wrong_method_names_the_right_ones() -> None:
    error = await error_of("GET", "/v1/completions")
    assert (error.status, error.headers) == (405, (("allow", "POST"),))
    assert error.message == "/v1/completions does not support GET, only POST"


def test_unknown_paths_need_a_key() -> None:
    assert find("GET", "/nowhere")[0].needs is Right.KEY
    assert find("GET", "/admin/nowhere")[0].needs is Right.ADMIN
    assert find("POST", "/livez")[0].needs is Right.NONE
