"""The input that each task takes, for the error messages of a call with another one."""

from collections.abc import Mapping

from gateway.core.errors import BadRequest, Unprocessable
from registry.records.function import FunctionTask, FunctionVersion

_DOES = {
    FunctionTask.GENERATE: "generates text",
    FunctionTask.EMBED: "makes embeddings",
    FunctionTask.CLASSIFY: "classifies images",
    FunctionTask.FEATURES: "computes features",
    FunctionTask.HANDLER: "runs a custom handler",
}
_FIELDS: Mapping[FunctionTask, tuple[str, ...]] = {
    FunctionTask.GENERATE: ("prompt", "messages"),
    FunctionTask.EMBED: ("input",),
    FunctionTask.CLASSIFY: ("image",),
    FunctionTask.FEATURES: ("text", "image"),
    FunctionTask.HANDLER: (),
}
_OPENAI = {
    FunctionTask.GENERATE: "/v1/completions or /v1/chat/completions",
    FunctionTask.EMBED: "/v1/embeddings",
}


def wrong_task(version: FunctionVersion) -> BadRequest:
    """Return the error for a call to an endpoint of another task, with the right endpoint."""
    name, task = version.function, version.task
    endpoint = _OPENAI.get(task, f"/functions/{name}/invoke")
    fields = _fields(task)
    return BadRequest(
        f"{name} {_DOES[task]}: use {endpoint}{f' with {fields}' if fields else ''}", param="model"
    )


def require_input(version: FunctionVersion, given: Mapping[str, object]) -> None:
    """Raise Unprocessable if the body of an invoke has no field that the function's task takes."""
    fields = _FIELDS[version.task]
    if fields and not any(field in given for field in fields):
        raise Unprocessable(
            f"{version.function} {_DOES[version.task]}: use {_fields(version.task)}", param=fields[0]
        )


def _fields(task: FunctionTask) -> str:
    return " or ".join(f"'{field}'" for field in _FIELDS[task])
