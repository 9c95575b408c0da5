"""The operations on functions, their secrets, and the blobs of which they are made."""

from typing import Any

from gateway.api.handlers import Handlers, Select
from gateway.core.rights import Right
from gateway.schemas import admin, answers
from gateway.schemas import parameters as p
from gateway.schemas.operations import BYTES, LINES, TEXT, Audit, Operation

_WAITS = (400, 409, 503, 504)


def _on_function(
    method: str, path: str, handler: Select, summary: str, answer: type | None, *failures: int, **more: Any
) -> Operation[Handlers]:
    """Return an operation on the function that the path names, by default one that changes it.

    A body may be missing.
    """
    return Operation(
        method,
        f"/admin/functions/{{name}}{path}",
        handler,
        summary,
        answer,
        needs=more.pop("needs", Right.MANAGE_FUNCTIONS),
        parameters=(p.FUNCTION_NAME, *more.pop("parameters", ())),
        failures=(404, *failures),
        empty_body="body" in more,
        **more,
    )


FUNCTION_OPERATIONS: tuple[Operation[Handlers], ...] = (
    Operation(
        "post",
        "/admin/functions",
        lambda to: to.admin.create,
        "Register a version",
        admin.CreatedFunction,
        needs=Right.MANAGE_FUNCTIONS,
        body=admin.CreateFunction,
        empty_body=True,
        status=201,
        failures=(*_WAITS, 507),
        audit=Audit("function.deploy", target="name", made="version"),
    ),
    Operation(
        "get",
        "/admin/functions",
        lambda to: to.admin.list_all,
        "The functions that the key may see",
        answers.FunctionList,
        needs=Right.READ_FUNCTIONS,
    ),
    _on_function(
        "get",
        "",
        lambda to: to.admin.show,
        "One function",
        answers.FunctionView,
        needs=Right.READ_FUNCTIONS,
    ),
    _on_function(
        "patch",
        "",
        lambda to: to.admin.change,
        "Change its scaling",
        answers.FunctionView,
        409,
        body=admin.PatchFunction,
        audit=Audit("function.change"),
    ),
    _on_function(
        "delete",
        "",
        lambda to: to.admin.delete,
        "Delete it",
        answers.DeletedFunction,
        409,
        audit=Audit("function.delete"),
    ),
    _on_function(
        "post",
        "/rollback",
        lambda to: to.admin.rollback,
        "Make an earlier version current",
        answers.FunctionView,
        *_WAITS,
        body=admin.RollbackRequest,
        audit=Audit("function.rollback"),
    ),
    _on_function(
        "post",
        "/scale",
        lambda to: to.cluster.scale,
        "Set its number of instances once",
        answers.ScaledFunction,
        *_WAITS,
        body=admin.ScaleRequest,
        audit=Audit("function.scale"),
    ),
    _on_function(
        "post",
        "/warm",
        lambda to: to.cluster.warm,
        "Load its image into host memory",
        None,
        *_WAITS,
        body=admin.WarmRequest,
        others=(LINES,),
        audit=Audit("function.warm"),
    ),
    _on_function(
        "post",
        "/pull",
        lambda to: to.cluster.pull,
        "A folder on a node's machine that other engines can load it from",
        None,
        *_WAITS,
        needs=Right.ADMIN,
        body=admin.PullRequest,
        others=(LINES,),
        audit=Audit("function.pull"),
    ),
    _on_function(
        "post",
        "/drop",
        lambda to: to.cluster.drop,
        "Drop its idle image",
        answers.DroppedImage,
        *_WAITS,
        body=admin.DropRequest,
        audit=Audit("function.evict"),
    ),
    _on_function(
        "get",
        "/logs",
        lambda to: to.cluster.logs,
        "Its log lines",
        None,
        422,
        others=(TEXT,),
        follows=True,
        parameters=(p.LINES, p.FOLLOW),
    ),
    Operation(
        "get",
        "/admin/functions/{name}/secrets",
        lambda to: to.secrets.list_all,
        "Its secrets, without values",
        answers.SecretList,
        needs=Right.ADMIN,
        parameters=(p.FUNCTION_NAME,),
        failures=(422,),
    ),
    Operation(
        "put",
        "/admin/functions/{name}/secrets/{key}",
        lambda to: to.secrets.put,
        "Set or replace a secret",
        answers.SecretView,
        needs=Right.ADMIN,
        audit=Audit("secret.set"),
        body=admin.PutSecret,
        parameters=(p.FUNCTION_NAME, p.SECRET_KEY),
        failures=(409,),
    ),
    Operation(
        "delete",
        "/admin/functions/{name}/secrets/{key}",
        lambda to: to.secrets.delete,
        "Delete a secret",
        answers.SecretView,
        audit=Audit("secret.delete"),
        needs=Right.ADMIN,
        parameters=(p.FUNCTION_NAME, p.SECRET_KEY),
        failures=(404, 409, 422),
    ),
    Operation(
        "post",
        "/admin/secrets/reencrypt",
        lambda to: to.secrets.reencrypt,
        "Encrypt all secrets with the newest cluster secret",
        answers.ReencryptedSecrets,
        audit=Audit("secret.reencrypt"),
        needs=Right.ADMIN,
        failures=(409,),
    ),
    Operation(
        "post",
        "/admin/blobs/missing",
        lambda to: to.blobs.missing,
        "Which blobs the store lacks",
        admin.MissingAnswer,
        needs=Right.MANAGE_FUNCTIONS,
        body=admin.MissingBlobs,
        unaudited="it reads, and keeps blobs from collection for a while",
    ),
    *(
        Operation(
            method,
            "/admin/blobs/{digest}",
            lambda to: to.blobs.status,
            "The status of a blob",
            answers.BlobStatus,
            needs=Right.MANAGE_FUNCTIONS,
            parameters=(p.DIGEST,),
            failures=(422,),
        )
        for method in ("get", "head")
    ),
    Operation(
        "patch",
        "/admin/blobs/{digest}",
        lambda to: to.blobs.append,
        "Add bytes to an upload",
        answers.BlobProgress,
        needs=Right.MANAGE_FUNCTIONS,
        body=(BYTES,),
        parameters=(p.DIGEST, p.UPLOAD_OFFSET, p.UPLOAD_LENGTH),
        failures=(409, 507),
        streamed_body=True,
        audit=Audit("blob.upload"),
    ),
)
