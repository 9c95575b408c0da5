"""Requests that schemathesis makes of /openapi.json, against a platform of its own: none may fail it.

`HYPERCAST_FUZZ_REQUESTS` is how many requests are sent in all, `HYPERCAST_FUZZ_SEED` what they follow from.
What is left out, since it would end or starve the run by doing what it is for: deleting the functions
that are called, revoking the keys in use, following a log without end, and long generations.
"""

import json
import math
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from gateway.api.handlers import Handlers
from gateway.api.operations import OPERATIONS
from gateway.schemas.operations import Operation
from tests.fixtures.encoder_checkpoints import write_encoder
from tests.fixtures.patience import PATIENCE_S
from tests.fixtures.platform import Platform

REQUESTS = int(os.environ.get("HYPERCAST_FUZZ_REQUESTS", "200"))
SEED = int(os.environ.get("HYPERCAST_FUZZ_SEED", "1"))
TIMEOUT_S = PATIENCE_S  # of one request: more is a hang
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
CALLED = ("coder", "embed", "classify", "clip", "echo")
SPARE = ("spare", "spare-model")  # functions to operate on
DOOMED = tuple(f"doomed-{index}" for index in range(4))  # functions to delete
MODES = (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)


def weight(operation: Operation[Handlers]) -> int:
    """How much of the requests an operation gets: more where there is more to get wrong."""
    return 6 if operation.body is not None else 2 if operation.parameters else 1


WEIGHTS = sum(map(weight, OPERATIONS)) * len(MODES)


@dataclass
class Fuzzed:
    """The platform under fire, its keys, and how many requests it has had."""

    platform: Platform
    schema: Any
    caller_key: str
    spare_key: str
    served: list[str]
    predictions: list[str]
    files: list[str]
    batches: list[str]
    answers: Counter[tuple[str, int]] = field(default_factory=Counter)


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory, root: Path) -> Iterator[Fuzzed]:
    folder = tmp_path_factory.mktemp("fuzz")
    platform = Platform(
        data=folder / "data",
        flags=("--nodes", "2", "--hosts", "2", "--allow-handlers", "--allow-unconfined-handlers"),
    )
    platform.up()
    try:
        for name in ("coder", "spare-model"):
            platform.run("deploy", str(root / "functions" / "tiny-coder"), "--name", name)
        for name in ("echo", "spare"):
            platform.run("deploy", str(root / "functions" / "echo"), "--name", name)
        for kind, name in (("bert", "embed"), ("vit", "classify"), ("clip", "clip")):
            write_encoder(kind, folder / kind)
            platform.run("deploy", str(folder / kind), "--name", name)
        with platform.http() as http:
            document = http.get("/openapi.json").json()
            caller, spare = (
                http.post("/admin/keys", json={"tenant": tenant}).json() for tenant in ("fuzz", "spare")
            )
            assets = http.get("/admin/functions/spare").json()["current"]["assets"]
            for name in DOOMED:
                draft = {"name": name, "task": "handler", "architecture": "Handler", "assets": assets}
                assert http.post("/admin/functions", json=draft).status_code == 201
        yield Fuzzed(
            platform=platform,
            schema=schemathesis.openapi.from_dict(document),
            caller_key=caller["key"],
            spare_key=spare["id"],
            served=["req-unknown"],
            **made_jobs(platform, caller["key"]),
        )
    finally:
        platform.down()


def made_jobs(platform: Platform, key: str) -> dict[str, list[str]]:
    """Make predictions, files and batches of the caller; return their ids."""
    line = {"custom_id": "1", "method": "POST", "url": "/v1/completions"}
    valid = json.dumps({**line, "body": {"model": "coder", "prompt": "x", "max_tokens": 2}}).encode()
    with platform.http() as http:
        http.headers["authorization"] = f"Bearer {key}"

        def made(method: str, path: str, **options: Any) -> str:
            answer = http.request(method, path, headers={"prefer": "respond-async"}, **options)
            assert answer.status_code in (200, 202), answer.text
            return str(answer.json()["id"])

        files = [
            made("POST", "/v1/files", files={"file": ("f", content)}, data={"purpose": "batch"})
            for content in (valid, b"nonsense", valid * 2)
        ]
        asked = {"endpoint": "/v1/completions", "completion_window": "24h"}
        batches = [made("POST", "/v1/batches", json={**asked, "input_file_id": file}) for file in files]
        call = {"model": "echo", "input": {}}
        predictions = [made("PUT", f"/predictions/fuzzed-{index}", json=call) for index in range(3)]
    return {"predictions": predictions, "files": files, "batches": batches}


IDS = st.lists(st.integers(0, 90), min_size=1, max_size=8)
BYTES = st.integers(0, 255)
PICTURE = st.lists(
    st.lists(st.lists(BYTES, min_size=3, max_size=3), min_size=4, max_size=4), min_size=4, max_size=4
)
SENSE = {  # what each function understands
    "coder": ("prompt", st.text(max_size=20) | IDS),
    "embed": ("input", IDS),
    "classify": ("image", PICTURE),
    "clip": ("text", IDS),
}
TURNS = st.lists(
    st.fixed_dictionaries({"role": st.just("user"), "content": st.text(min_size=1, max_size=8)}),
    min_size=1,
    max_size=2,
)
TENSORS = st.builds(
    lambda rows: [{"name": "input_ids", "shape": [len(rows), 3], "datatype": "INT64", "data": rows}],
    st.lists(st.lists(st.integers(0, 90), min_size=3, max_size=3), min_size=1, max_size=3),
)
# The same of the other protocols, by the end of their path: which field, and which functions understand it.
PROTOCOLS = {
    "/responses": ("input", st.text(min_size=1, max_size=20), ("coder",)),
    "/messages": ("messages", TURNS, ("coder",)),
    "/count_tokens": ("messages", TURNS, ("coder",)),
    "/rerank": ("query", st.text(min_size=1, max_size=20), ("embed",)),
    "/tokenize": ("prompt", st.text(max_size=20), ("coder",)),
    "/detokenize": ("tokens", IDS, ("coder",)),
    "/infer": ("inputs", TENSORS, ("embed", "clip")),
}
# What bounds a generation: without it the run would be one of long ones.
MOST_TOKENS = {"/messages": "max_tokens", "/responses": "max_output_tokens"}


PREFERENCES = ("respond-async", "wait=1", "wait=0, handling=lenient", "wait=-1", "")
MOST_KNOWN = 20  # ids of each kind that later requests may have


def aim_jobs(case: Any, draw: Any, fuzzed: Fuzzed) -> None:
    """Let some requests for jobs and quotes name what there is, and calls that make sense."""
    parts, body = case.path_parameters or {}, case.body
    for part, known in (
        ("prediction", fuzzed.predictions),
        ("file", fuzzed.files),
        ("batch", fuzzed.batches),
    ):
        if part in parts and known and draw(st.booleans()):
            parts[part] = draw(st.sampled_from(known))
    if case.query and case.query.get("after") and draw(st.booleans()):
        case.query["after"] = draw(st.sampled_from([*fuzzed.predictions, *fuzzed.files, *fuzzed.batches]))
    if case.operation.path.startswith(("/predictions", "/v1/batches")):
        case.headers = {**(case.headers or {}), "prefer": draw(st.sampled_from(PREFERENCES))}
    if case.operation.path == "/v1/quote" and draw(st.booleans()):
        function = draw(st.sampled_from(sorted(SENSE)))
        field_name, values = SENSE[function]
        case.body = {"model": function, field_name: draw(values)}
    if isinstance(body, dict) and "input_file_id" in body and draw(st.booleans()):
        body["input_file_id"] = draw(st.sampled_from(fuzzed.files))
        body["endpoint"] = "/v1/completions"
    if isinstance(body, dict) and isinstance(body.get("input"), dict) and draw(st.booleans()):
        function = draw(st.sampled_from(sorted(SENSE)))
        field_name, values = SENSE[function]
        body["model"], body["input"] = function, {field_name: draw(values), "max_tokens": 2}


def note_jobs(path: str, status: int, answer: bytes, fuzzed: Fuzzed) -> None:
    """Keep the ids of some predictions, files and batches that were made, for later requests."""
    for prefix, known in (
        ("/predictions", fuzzed.predictions),
        ("/v1/files", fuzzed.files),
        ("/v1/batches", fuzzed.batches),
    ):
        if path.startswith(prefix) and not path.endswith("/content") and status in (200, 202):
            found = json.loads(answer)
            if isinstance(found, dict) and isinstance(found.get("id"), str) and len(known) < MOST_KNOWN:
                known.append(found["id"])


def aim_body(case: Any, draw: Any, function: Any) -> None:
    """Let some requests make sense, so that they get past the checks."""
    if function not in SENSE or case.operation.path == "/v1/chat/completions" or not draw(st.booleans()):
        return
    field_name, values = SENSE[function]
    case.body[field_name] = draw(values)
    if case.operation.path.endswith("/invoke"):
        case.body.pop("messages", None)


def aim_protocol(case: Any, draw: Any) -> None:
    """Let some requests of other protocols make sense, and none generate for long."""
    ending = "/" + case.operation.path.rpartition("/")[2]
    if ending not in PROTOCOLS or not isinstance(case.body, dict):
        return
    most = MOST_TOKENS.get(ending, "")
    given = case.body.get(most)
    if (isinstance(given, int) and given > 4) or (given is None and ending == "/responses"):
        case.body[most] = 2
    field_name, values, functions = PROTOCOLS[ending]
    if draw(st.booleans()):
        case.body[field_name] = draw(values)
        if "model" in case.body:
            case.body["model"] = draw(st.sampled_from(functions))
        elif "model" in (case.path_parameters or {}):
            case.path_parameters["model"] = draw(st.sampled_from(functions))


def aim(case: Any, draw: Any, fuzzed: Fuzzed) -> None:
    """Point most requests at what is there, and keep them from what would end the run."""
    operation = case.operation
    parts = case.path_parameters or {}
    there = CALLED
    if operation.path.startswith("/admin/"):
        there = {"get": CALLED, "delete": DOOMED}.get(operation.method, SPARE)
    if draw(st.integers(0, 9)) < 7:
        for part in ("name", "function", "model"):
            if part in parts:
                parts[part] = draw(st.sampled_from(there))
        if "version" in parts:
            parts["version"] = "1"
        if "key_id" in parts:
            parts["key_id"] = fuzzed.spare_key
        if "request_id" in parts:
            parts["request_id"] = draw(st.sampled_from(fuzzed.served))
        if isinstance(case.body, dict) and "model" in case.body:
            fitting = ("embed", "clip") if operation.path == "/v1/embeddings" else ("coder", "embed")
            case.body["model"] = draw(st.sampled_from(fitting))
        if isinstance(case.body, dict) and operation.path.startswith(("/v1/", "/functions/")):
            aim_body(case, draw, parts.get("function") or case.body.get("model"))
    aim_protocol(case, draw)
    aim_jobs(case, draw, fuzzed)
    if operation.method == "delete" and parts.get("name") in (*CALLED, *SPARE):
        parts["name"] = DOOMED[0]
    if case.query and "follow" in case.query:
        case.query["follow"] = "false"
    if operation.path == "/admin/watch":
        case.query = {**(case.query or {}), "once": "true"}
    if isinstance(case.body, dict):
        for field, most in (("max_tokens", 4), ("max_completion_tokens", 4), ("n", 2), ("best_of", 2)):
            value = case.body.get(field)
            if isinstance(value, int) and value > most:
                case.body[field] = most
        if operation.path.endswith(("completions", "invoke")):
            case.body.setdefault("max_tokens", 2)
        if operation.path.endswith("/scale"):
            case.body["wait"] = False


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.value)
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda op: f"{op.method} {op.path}")
def test_no_request_breaks_it(fuzzed: Fuzzed, operation: Operation[Handlers], mode: GenerationMode) -> None:
    made = fuzzed.schema[operation.path][operation.method.upper()].as_strategy(generation_mode=mode)

    @hypothesis.seed(SEED)
    @settings(
        max_examples=math.ceil(REQUESTS * weight(operation) / WEIGHTS),
        phases=(Phase.generate,),
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @hypothesis.given(made, st.data())
    def send(case: Any, data: st.DataObject) -> None:
        aim(case, data.draw, fuzzed)
        needs_admin = operation.path.startswith("/admin/") and data.draw(st.integers(0, 9)) < 9
        key = fuzzed.platform.key if needs_admin else fuzzed.caller_key
        response = case.call(
            base_url=fuzzed.platform.url,
            headers={"authorization": f"Bearer {key}"},
            session=session,
            timeout=TIMEOUT_S,
        )
        fuzzed.answers[f"{operation.method} {operation.path}", response.status_code] += 1
        note_jobs(operation.path, response.status_code, response.content, fuzzed)
        if response.status_code == 200 and operation.calls:
            fuzzed.served.append(response.headers["x-request-id"][0])
        case.validate_response(response, checks=CHECKS)

    with requests.Session() as session:
        session.trust_env = False
        send()


def test_the_platform_still_serves(fuzzed: Fuzzed) -> None:
    """Last: as many requests as promised were sent, and every function works as before."""
    assert fuzzed.answers.total() >= REQUESTS
    for (operation, status), count in sorted(fuzzed.answers.items()):
        print(f"{count:5d} × {status} {operation}")
    with fuzzed.platform.http() as http:
        prompt = {"model": "coder", "prompt": "import", "max_tokens": 4, "temperature": 0}
        answer = http.post("/v1/completions", json=prompt)
        assert answer.status_code == 200, answer.text
        assert http.post("/functions/echo/invoke", content=json.dumps({"a": 1})).json() == {"a": 1}
        assert http.get("/health").json()["status"] == "ready"
    assert "Traceback" not in "".join(
        path.read_text(errors="replace") for path in (fuzzed.platform.data / "logs").glob("gateway*.log")
    )
