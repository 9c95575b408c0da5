"""/admin/functions: register, show, change and delete functions."""

import contextlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import msgspec
from starlette.requests import Request

from gateway.api.blob_collector import BlobCollector, blobs_of
from gateway.api.bodies import managed_function, read_json
from gateway.api.function_view import function_view
from gateway.core.errors import ApiError, BadRequest, Unprocessable
from gateway.core.request_context import request_context
from gateway.core.rights import Right, may
from gateway.inference.assets import MAX_ASSET_BYTES, READ_FILES
from gateway.requests.services import Services
from gateway.schemas.admin import AccessPatch, CreatedFunction, CreateFunction, PatchFunction, RollbackRequest
from gateway.schemas.answers import DeletedFunction, FunctionList, FunctionView
from gateway.tenants.access import may_read, name_taken, planned_access
from registry.config.engine_args import check_vllm_args
from registry.config.function_yaml import FILE_NAME, MAX_FILE_BYTES, parse_function_yaml
from registry.config.handler_spec import HandlerSpec
from registry.errors import Conflict, InvalidRecord, NotFound
from registry.images.adapters import MAX_FILES_BYTES, adapters_of, check_adapters, config_of, rank_of
from registry.images.architectures import context_length_of
from registry.images.codec import MAX_MANIFEST_BYTES, decode_manifest
from registry.images.manifest import default_blocks
from registry.records.engine import EngineKind
from registry.records.function import (
    BUILTIN_PREFIX,
    BUILTINS,
    Access,
    Function,
    FunctionTask,
    FunctionVersion,
    Scaling,
    ServingMode,
    check_name,
    check_policy,
    check_serving,
    default_policy,
    default_scaling,
)
from registry.records.function_changes import no_function

_log = logging.getLogger("hypercast.gateway")


class FunctionAdmin:
    """The handlers of function management."""

    def __init__(self, services: Services, collector: BlobCollector) -> None:
        self._services = services
        self._collector = collector
        self._create = msgspec.json.Decoder(CreateFunction)
        self._patch = msgspec.json.Decoder(PatchFunction)
        self._rollback = msgspec.json.Decoder(RollbackRequest)

    async def create(self, request: Request) -> CreatedFunction:
        """Check a version, load it into host memory, and only then register it as the current one.

        A deploy that cannot be loaded leaves no trace, and version numbers follow the order in which
        versions become current.
        """
        payload = await read_json(request, self._services, self._create, absent=b"{}")
        check_name(payload.name)
        key = request_context(request.scope).caller
        access = partial(planned_access, key, payload.name, payload.access)
        known = await self._access(payload.name)
        access(known)
        if known is None and not may(key, Right.ADMIN):
            await self._check_unreserved(payload.name)
        draft = await self._checked(payload, key.id)
        await self._scaling(payload)
        request_context(request.scope).set_version(draft)
        blobs = blobs_of(draft)
        self._collector.renew_pins(blobs)
        natively = await self._services.cluster.check_model(draft)
        draft = replace(draft, native_first=natively and draft.engine is not EngineKind.NATIVE)
        await self._services.cluster.ensure_host_copy(draft)
        async with self._collector.exclusive() as lease:
            await self._check_blobs(draft)
            scaling = await self._scaling(payload)
            replaced = await self._replaced(payload)
            await lease.renew()
            is_tenant = not may(key, Right.ADMIN)
            version = await self._services.state.create_version(
                draft, scaling, access, unreserved=is_tenant, becomes_current=payload.make_current
            )
            self._collector.unpin(blobs)
        request_context(request.scope).set_version(version)
        _log.info("registered %s:%d", version.function, version.version)
        with contextlib.suppress(NotFound):  # deleted at once
            head = await self._services.state.function(payload.name)
            if head.current == version.version:
                self._services.functions.set_current(head, version)
        return CreatedFunction(
            name=version.function,
            version=version.version,
            image=version.image,
            bytes=version.image_bytes,
            blocks=version.blocks,
            previous_version=replaced.version if replaced else None,
            previous_architecture=replaced.architecture if replaced else None,
        )

    async def list_all(self, request: Request) -> FunctionList:
        """List the functions that the key may see."""
        key, view = request_context(request.scope).caller, self._services.cluster.view()
        functions = await self._services.state.functions()
        versions = {(v.function, v.version): v for v in await self._services.state.versions()}
        shown = [
            function_view(key, view, function, versions[function.name, function.current])
            for function in functions
            if (function.name, function.current) in versions and may_read(key, function)
        ]
        return FunctionList(functions=shown)

    async def show(self, request: Request) -> FunctionView:
        """Show a function with all its versions."""
        name = request.path_params["name"]
        key = request_context(request.scope).caller
        function = await self._services.state.function(name)
        if not may_read(key, function):
            raise no_function(name)
        current = await self._services.state.version(name, function.current)
        history = await self._services.state.versions(name)
        decision = await self._services.state.scaling_record(name)
        if decision is not None and decision.at < function.created_at:  # of a function that was deleted
            decision = None
        return function_view(key, self._services.cluster.view(), function, current, history, decision)

    async def change(self, request: Request) -> FunctionView:
        """Change scaling settings, owner or sharing."""
        function = await managed_function(request, self._services)
        payload = await read_json(request, self._services, self._patch, absent=b"{}")
        name, state = function.name, self._services.state
        scaling = payload.scaling.applied(function.scaling)
        if {"policy", "serving"} & payload.scaling.given.keys():
            version = await state.version(name, function.current)
            check_policy(payload.scaling.given, version.task)
            check_serving(scaling.serving, version.engine)
        if payload.access != AccessPatch():
            access = partial(planned_access, request_context(request.scope).caller, name, payload.access)
            function = await state.set_access(name, access)
            version = await state.version(name, function.current)
            self._services.functions.set_current(function, version)
        if not payload.scaling.empty:
            await state.set_scaling(name, scaling)
        return await self.show(request)

    async def rollback(self, request: Request) -> FunctionView:
        """Make an earlier version current; requests in flight end on the version that they have."""
        function = await managed_function(request, self._services)
        payload = await read_json(request, self._services, self._rollback, absent=b"{}")
        number = payload.version if payload.version is not None else _version_before(function)
        version = await self._services.state.version(function.name, number)
        await self._check_secrets(version)
        await self._services.cluster.ensure_host_copy(version)
        at = self._services.clock.wall_s()
        function = await self._services.state.set_current(function.name, number, at=at)
        self._services.functions.set_current(function, version)
        return await self.show(request)

    async def delete(self, request: Request) -> DeletedFunction:
        """Delete the function, then the blobs that no other version uses."""
        name = (await managed_function(request, self._services)).name
        versions = await self._services.state.versions(name)
        await self._services.state.delete_function(name)
        self._services.functions.remove(name)
        collected = await self._collector.collect(versions)
        return DeletedFunction(name=name, collected=len(collected))

    async def _access(self, name: str) -> Access | None:
        """Return the access of a function, None if it does not exist."""
        try:
            return (await self._services.state.function(name)).access
        except NotFound:
            return None

    async def _check_unreserved(self, name: str) -> None:
        """Refuse a tenant's new function under a name for which an administrator has set secrets."""
        if (await self._services.state.function_secrets(name)).secrets:
            raise name_taken(name)

    async def _scaling(self, payload: CreateFunction) -> Scaling | None:
        """Return the scaling settings to store; None keeps those of a known function."""
        before = await self._replaced(payload)
        check_policy(payload.scaling.given, payload.task)
        if before is None:
            scaling = payload.scaling.applied(default_scaling(payload.task))
            check_serving(scaling.serving, payload.engine)
            return scaling
        known = before_scaling = (await self._services.state.function(payload.name)).scaling
        if before.task is not payload.task and payload.task is not FunctionTask.GENERATE:
            known = replace(known, policy=default_policy(payload.task), serving=ServingMode.COLOCATED)
        scaling = payload.scaling.applied(known)
        check_serving(scaling.serving, payload.engine)
        return None if payload.scaling.empty and scaling == before_scaling else scaling

    async def _replaced(self, payload: CreateFunction) -> FunctionVersion | None:
        """Return the current version of a function that exists. Raises Conflict if its task is another."""
        try:
            current = await self._services.state.version(payload.name, None)
        except NotFound:
            return None
        if current.task is not payload.task and not payload.replace_task:
            raise Conflict(
                f"{payload.name} has the task {current.task} ({current.architecture}), not {payload.task}: "
                "deploy under another name, or set replace_task"
            )
        return current

    async def _checked(self, payload: CreateFunction, key_id: str) -> FunctionVersion:
        nbytes, blocks = await self._checked_image(payload)
        _check_assets(payload.task, payload.architecture, payload.assets)
        version = FunctionVersion(
            function=payload.name,
            version=0,
            task=payload.task,
            architecture=payload.architecture,
            image=payload.image,
            manifest=payload.manifest,
            image_bytes=nbytes,
            blocks=blocks,
            dtype=payload.dtype,
            context_length=payload.context_length,
            assets=dict(payload.assets),
            created_at=self._services.clock.wall_s(),
            description=payload.description,
            deployed_by=key_id,
            source=payload.source,
            revision=payload.revision,
            engine=payload.engine,
            engine_args=_engine_args(payload),
        )
        await self._check_blobs(version)
        if payload.task is not FunctionTask.HANDLER:
            await self._check_readable(version)
            if version.engine is not EngineKind.NATIVE:
                await self._check_adapters(version)
        elif FILE_NAME in version.assets:
            handler = await self._checked_handler(version.assets[FILE_NAME])
            version = replace(version, secrets=handler.secrets if handler else ())
            await self._check_secrets(version)
        return version

    async def _checked_handler(self, digest: str) -> HandlerSpec | None:
        """Check a handler's function.yaml, which the nodes read. Raises Unprocessable."""
        await self._check_size(digest, MAX_FILE_BYTES, FILE_NAME)
        try:
            text = await self._services.blobs.read(digest, limit=MAX_FILE_BYTES)
            return parse_function_yaml(text).handler
        except InvalidRecord as error:
            raise Unprocessable(f"{FILE_NAME}: {error}", param="assets") from error

    async def _check_secrets(self, version: FunctionVersion) -> None:
        """Check that the secrets which a version needs are set and can be decrypted."""
        try:
            await self._services.vault.values(version.function, version.secrets)
        except NotFound as error:
            raise ApiError(422, "secret_missing", str(error), param="assets") from error

    async def _check_size(self, digest: str, max_bytes: int, what: str) -> None:
        size = await self._services.blobs.size(digest)
        if size is not None and size > max_bytes:
            raise Unprocessable(f"{what} has {size} bytes; at most {max_bytes} are allowed", param="assets")

    async def _check_readable(self, version: FunctionVersion) -> None:
        """Check that the assets are readable, and the context no longer than the model's."""
        for name in READ_FILES:
            if name in version.assets:
                await self._check_size(version.assets[name], MAX_ASSET_BYTES, name)
        try:
            assets = await self._services.assets.get(version)
        except ApiError as error:
            if error.code != "function_error":
                raise
            raise Unprocessable(error.message, param="assets") from error
        if not assets.config.get("architectures"):
            return
        longest = context_length_of(assets.config, version.engine)
        if version.context_length > longest:
            raise Unprocessable(
                f"context_length {version.context_length} is over the model's own, {longest} tokens",
                param="context_length",
            )

    async def _check_adapters(self, version: FunctionVersion) -> None:
        """Check the adapters, and that all files can be sent to a node with a start. Raises Unprocessable."""
        try:
            check_adapters(version.assets)
            for adapter in adapters_of(version.assets):
                name = config_of(adapter)
                await self._check_size(version.assets[name], MAX_ASSET_BYTES, name)
                rank_of(await self._services.blobs.read(version.assets[name], limit=MAX_ASSET_BYTES))
        except InvalidRecord as error:
            raise Unprocessable(str(error), param="assets") from error
        nbytes = sum([await self._services.blobs.size(digest) or 0 for digest in version.assets.values()])
        if nbytes > MAX_FILES_BYTES:
            raise Unprocessable(
                f"the files beside the weights, adapters included, have {nbytes} bytes; at most "
                f"{MAX_FILES_BYTES} are allowed in all",
                param="assets",
            )

    async def _check_blobs(self, version: FunctionVersion) -> None:
        lacking = [d for d in sorted(blobs_of(version)) if await self._services.blobs.size(d) is None]
        if lacking:
            raise BadRequest(
                f"the store lacks {len(lacking)} blobs of this function (first {lacking[0]}): upload them",
                code="blobs_missing",
            )

    async def _checked_image(self, payload: CreateFunction) -> tuple[int, int]:
        """Return the image's size and block count, once its manifest matches the request."""
        if payload.task is FunctionTask.HANDLER and payload.image is None and payload.manifest is None:
            return 0, 0
        if payload.image is None or payload.manifest is None:
            raise Unprocessable("a model function needs image and manifest", param="image")
        await self._check_size(payload.manifest, MAX_MANIFEST_BYTES, "the manifest")
        try:
            encoded_manifest = await self._services.blobs.read(payload.manifest, limit=MAX_MANIFEST_BYTES)
        except NotFound:
            raise BadRequest(
                f"the store lacks the manifest {payload.manifest}: upload it", code="blobs_missing"
            ) from None
        manifest = decode_manifest(encoded_manifest)
        size = await self._services.blobs.size(payload.image)
        for what, given, found in (
            ("image", payload.image, manifest.sha256),
            ("architecture", payload.architecture, manifest.architecture),
        ):
            if given != found:
                raise Unprocessable(f"{what} is {given}, but its manifest says {found}", param=what)
        if size is not None and size != manifest.nbytes:
            raise Unprocessable(
                f"the image has {size} bytes, its manifest says {manifest.nbytes}", param="image"
            )
        return manifest.nbytes, default_blocks(manifest.nbytes)


def _version_before(function: Function) -> int:
    earlier: Sequence[int] = [number for number in function.versions if number < function.current]
    if not earlier:
        raise BadRequest(
            f"function {function.name!r} has no version before {function.current}: name the version"
        )
    return max(earlier)


def _engine_args(payload: CreateFunction) -> tuple[str, ...]:
    """Return the checked arguments of the engine. Raises Unprocessable."""
    if payload.engine is EngineKind.NATIVE:
        if payload.task is not FunctionTask.HANDLER and adapters_of(payload.assets):
            raise Unprocessable("LoRA adapters are for another engine (engine: vllm)", param="assets")
        if payload.engine_args:
            raise Unprocessable("engine_args are for another engine (engine: vllm)", param="engine_args")
        return ()
    if payload.task is not FunctionTask.GENERATE:
        raise Unprocessable(
            f"the engine {payload.engine} is for functions with the task generate, not {payload.task}",
            param="engine",
        )
    try:
        return check_vllm_args(payload.engine_args)
    except InvalidRecord as error:
        raise Unprocessable(str(error), param="engine_args") from error


def _check_assets(task: FunctionTask, architecture: str, assets: Mapping[str, str]) -> None:
    if task is not FunctionTask.HANDLER and "config.json" not in assets:
        raise Unprocessable(f"a {task} function needs the asset config.json", param="assets")
    builtin = architecture.startswith(BUILTIN_PREFIX)
    if builtin and architecture.removeprefix(BUILTIN_PREFIX) not in BUILTINS:
        raise Unprocessable(f"there is no built-in handler {architecture!r}", param="architecture")
    if task is FunctionTask.HANDLER and not builtin and not any(name.endswith(".py") for name in assets):
        raise Unprocessable("a handler needs its code (a .py file) among the assets", param="assets")
    for name in assets:
        if name.startswith("/") or ".." in name.split("/") or "\\" in name or "\0" in name:
            raise Unprocessable(f"asset name {name!r} must be a relative path without '..'", param="assets")
