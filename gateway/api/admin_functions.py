"""/admin/functions: registering, showing, changing and deleting functions."""

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from typing import TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from gateway import exchange as exchanges
from gateway.assets import MAX_ASSET_BYTES, READ_FILES
from gateway.blob_keeper import BlobKeeper, blobs_of
from gateway.errors import ApiError, BadRequest, Unprocessable
from gateway.limits import decode, read_body
from gateway.responses import encoded
from gateway.schemas_admin import CreatedFunction, CreateFunction, PatchFunction, Rollback
from gateway.services import Services
from registry.errors import InvalidRecord, NotFound
from registry.function import (
    BUILTIN_PREFIX,
    BUILTINS,
    Function,
    FunctionVersion,
    Scaling,
    Task,
    check_name,
)
from registry.function_yaml import FILE_NAME, MAX_FILE_BYTES, parse_function_yaml
from registry.images.architectures import context_length_of
from registry.images.codec import MAX_MANIFEST_BYTES, decode_manifest
from registry.images.manifest import default_blocks

_log = logging.getLogger("hypercast.gateway")

T = TypeVar("T")


class FunctionAdmin:
    """Functions as operators see them."""

    def __init__(self, services: Services, keeper: BlobKeeper) -> None:
        self._services = services
        self._keeper = keeper
        self._create = msgspec.json.Decoder(CreateFunction)
        self._patch = msgspec.json.Decoder(PatchFunction)
        self._rollback = msgspec.json.Decoder(Rollback)

    async def create(self, request: Request) -> Response:
        """Check a version, bring it into host memory, and only then register it, as the current one: a
        deploy that cannot be loaded leaves nothing behind, and numbers are given in the order in which
        versions become current."""
        asked = await self._body(request, self._create)
        check_name(asked.name)
        draft = await self._checked(asked)
        await self._scaling(asked)
        exchanges.of(request.scope).concerns(draft)
        blobs = blobs_of(draft)
        self._keeper.hold(blobs)
        await self._services.cluster.ensure_host_copy(draft)
        async with self._keeper.exclusive():
            await self._check_blobs(draft)
            scaling = await self._scaling(asked)
            version = await self._services.state.create_version(draft, scaling)
            self._keeper.unpin(blobs)
        exchanges.of(request.scope).concerns(version)
        _log.info("registered %s:%d", version.function, version.version)
        self._services.functions.learn(version)
        answer = CreatedFunction(
            name=version.function,
            version=version.version,
            image=version.image,
            bytes=version.image_bytes,
            blocks=version.blocks,
        )
        return encoded(answer, status=201)

    async def list_all(self, request: Request) -> Response:
        functions = await self._services.state.functions()
        versions = {(v.function, v.version): v for v in await self._services.state.versions()}
        shown = [
            self._shown(function, versions[function.name, function.current])
            for function in functions
            if (function.name, function.current) in versions
        ]
        return encoded({"functions": shown})

    async def show(self, request: Request) -> Response:
        name = request.path_params["name"]
        function = await self._services.state.function(name)
        current = await self._services.state.version(name, function.current)
        history = await self._services.state.versions(name)
        return encoded({**self._shown(function, current), "history": history})

    async def change(self, request: Request) -> Response:
        """Change scaling settings."""
        name = request.path_params["name"]
        asked = await self._body(request, self._patch)
        function = await self._services.state.function(name)
        await self._services.state.set_scaling(name, asked.scaling.applied(function.scaling))
        return await self.show(request)

    async def rollback(self, request: Request) -> Response:
        """Make an earlier version current; requests in flight end on theirs."""
        name = request.path_params["name"]
        asked = await self._body(request, self._rollback)
        function = await self._services.state.function(name)
        number = asked.version if asked.version is not None else _version_before(function)
        version = await self._services.state.version(name, number)
        await self._services.cluster.ensure_host_copy(version)
        await self._services.state.set_current(name, number)
        self._services.functions.learn(version)
        return await self.show(request)

    async def delete(self, request: Request) -> Response:
        """Delete the function, then the blobs that nothing else uses."""
        name = request.path_params["name"]
        versions = await self._services.state.versions(name)
        await self._services.state.delete_function(name)
        self._services.functions.forget(name)
        collected = await self._keeper.released(versions)
        return encoded({"name": name, "collected": len(collected)})

    async def _body(self, request: Request, decoder: msgspec.json.Decoder[T]) -> T:
        limits = self._services.settings.limits
        body = await read_body(request.scope, request.receive, limits)
        return decode(body or b"{}", decoder, limits)

    async def _scaling(self, asked: CreateFunction) -> Scaling | None:
        """None keeps what a known function has."""
        if asked.scaling.empty:
            return None
        try:
            known = (await self._services.state.function(asked.name)).scaling
        except NotFound:
            known = Scaling()
        return asked.scaling.applied(known)

    async def _checked(self, asked: CreateFunction) -> FunctionVersion:
        nbytes, blocks = await self._checked_image(asked)
        _check_assets(asked.task, asked.architecture, asked.assets)
        version = FunctionVersion(
            function=asked.name,
            version=0,
            task=asked.task,
            architecture=asked.architecture,
            image=asked.image,
            manifest=asked.manifest,
            image_bytes=nbytes,
            blocks=blocks,
            dtype=asked.dtype,
            context_length=asked.context_length,
            assets=dict(asked.assets),
            created_at=self._services.clock.wall_s(),
            description=asked.description,
        )
        await self._check_blobs(version)
        if asked.task is not Task.HANDLER:
            await self._check_readable(version)
        elif FILE_NAME in version.assets:
            await self._check_settings(version.assets[FILE_NAME])
        return version

    async def _check_settings(self, digest: str) -> None:
        """A handler's function.yaml, which the nodes will follow, must be one."""
        await self._check_size(digest, MAX_FILE_BYTES, FILE_NAME)
        try:
            parse_function_yaml(await self._services.blobs.read(digest, limit=MAX_FILE_BYTES))
        except InvalidRecord as error:
            raise Unprocessable(f"{FILE_NAME}: {error}", param="assets") from error

    async def _check_size(self, digest: str, most_bytes: int, what: str) -> None:
        size = await self._services.blobs.size(digest)
        if size is not None and size > most_bytes:
            raise Unprocessable(f"{what} has {size} bytes, at most {most_bytes} are read", param="assets")

    async def _check_readable(self, version: FunctionVersion) -> None:
        """What requests will need must be readable, and the context no longer than the model's."""
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
        longest = context_length_of(assets.config)
        if version.context_length > longest:
            raise Unprocessable(
                f"the model's context holds {longest} tokens, not {version.context_length}",
                param="context_length",
            )

    async def _check_blobs(self, version: FunctionVersion) -> None:
        lacking = [d for d in sorted(blobs_of(version)) if await self._services.blobs.size(d) is None]
        if lacking:
            raise BadRequest(
                f"the store lacks {len(lacking)} blobs of this function, first {lacking[0]}: upload them",
                code="blobs_missing",
            )

    async def _checked_image(self, asked: CreateFunction) -> tuple[int, int]:
        """The image's size and block count, once its manifest agrees with what is asked."""
        if asked.task is Task.HANDLER and asked.image is None and asked.manifest is None:
            return 0, 0
        if asked.image is None or asked.manifest is None:
            raise Unprocessable("a model function needs image and manifest", param="image")
        await self._check_size(asked.manifest, MAX_MANIFEST_BYTES, "the manifest")
        try:
            encoded_manifest = await self._services.blobs.read(asked.manifest, limit=MAX_MANIFEST_BYTES)
        except NotFound:
            raise BadRequest(
                f"the store lacks the manifest {asked.manifest}: upload it", code="blobs_missing"
            ) from None
        manifest = decode_manifest(encoded_manifest)
        size = await self._services.blobs.size(asked.image)
        for what, told, found in (
            ("image", asked.image, manifest.sha256),
            ("architecture", asked.architecture, manifest.architecture),
        ):
            if told != found:
                raise Unprocessable(f"the manifest is of {what} {found}, not {told}", param=what)
        if size is not None and size != manifest.nbytes:
            raise Unprocessable(
                f"the image has {size} bytes, its manifest says {manifest.nbytes}", param="image"
            )
        return manifest.nbytes, default_blocks(manifest.nbytes)

    def _shown(self, function: Function, current: FunctionVersion) -> dict[str, object]:
        view = self._services.cluster.view()
        instances = [i for i in view.instances if i.function == function.name]
        known = [change.record for change in view.live]
        live = [one for one in known if (one.function, one.version) == (function.name, current.version)]
        return {
            "name": function.name,
            "current": current,
            "versions": function.versions,
            "scaling": dataclasses.asdict(function.scaling),
            "created_at": function.created_at,
            "instances": instances,
            "live": live[0] if live else None,
        }


def _version_before(function: Function) -> int:
    earlier: Sequence[int] = [number for number in function.versions if number < function.current]
    if not earlier:
        raise BadRequest(f"function {function.name!r} has no version before {function.current}")
    return max(earlier)


def _check_assets(task: Task, architecture: str, assets: Mapping[str, str]) -> None:
    if task is not Task.HANDLER and "config.json" not in assets:
        raise Unprocessable(f"a {task} function needs the asset config.json", param="assets")
    builtin = architecture.startswith(BUILTIN_PREFIX)
    if builtin and architecture.removeprefix(BUILTIN_PREFIX) not in BUILTINS:
        raise Unprocessable(f"there is no {architecture}", param="architecture")
    if task is Task.HANDLER and not builtin and not any(name.endswith(".py") for name in assets):
        raise Unprocessable("a handler needs its code among the assets", param="assets")
    for name in assets:
        if name.startswith("/") or ".." in name.split("/") or "\\" in name or "\0" in name:
            raise Unprocessable(f"bad asset name {name!r}", param="assets")
