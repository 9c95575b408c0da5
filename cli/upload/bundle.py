"""What a deploy uploads: the blobs of a function and the record that names them."""

import hashlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from cli.errors import DeployError, UsageError
from cli.progress import byte_meter
from cli.upload.packed import PackedPlan, is_packed, packed_plan
from invoker.emulated.image import EmulatedPlan
from registry.config.emulation import is_emulated, parse_model
from registry.config.function_yaml import FILE_NAME, FunctionSpec, load_function_yaml, parse_function_yaml
from registry.images.architectures import context_length_of, dropped_head, task_of
from registry.images.assets import collect_assets
from registry.images.codec import encode_manifest, manifest_digest
from registry.images.pack import hash_image
from registry.images.plan import ImagePlan, PackPlan, plan_checkpoint
from registry.images.source import checkpoint_from
from registry.records.engine import EngineKind
from registry.records.function import BUILTIN_PREFIX, FunctionTask

MAX_HANDLER_BYTES = 64 << 20
SKIPPED = "__pycache__"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineChoice:
    """What runs a model: the engine, its arguments, and the files of LoRA adapters."""

    kind: EngineKind = EngineKind.NATIVE
    arguments: tuple[str, ...] = ()
    adapters: Mapping[str, bytes] = field(default_factory=dict)


NATIVE = EngineChoice()


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """The parts of a function. `blobs` by digest are small; the image is read from `plan` when sent."""

    task: FunctionTask
    architecture: str
    dtype: str = ""
    context_length: int = 0
    image: str | None = None
    manifest: str | None = None
    image_bytes: int = 0
    assets: dict[str, str]
    description: str
    source: str = ""
    revision: str = ""
    engine: EngineKind = EngineKind.NATIVE
    engine_args: tuple[str, ...] = ()
    plan: ImagePlan | None = None
    blobs: dict[str, bytes] = field(default_factory=dict)


def builtin_yaml(source: str) -> str:
    """Return the function.yaml of the source `builtin:NAME`, "" for any other source."""
    if not source.startswith(BUILTIN_PREFIX):
        return ""
    return f"name: {source.removeprefix(BUILTIN_PREFIX)}\nhandler: {source}\n"


def read_spec(source: str) -> FunctionSpec | None:
    """Return the function.yaml of a folder, None if it has none."""
    if text := builtin_yaml(source):
        return parse_function_yaml(text)
    folder = Path(source).expanduser()
    return load_function_yaml(folder) if (folder / FILE_NAME).is_file() else None


def model_source(source: str, spec: FunctionSpec | None) -> str:
    """Return the checkpoint that function.yaml names, else `source` itself. Raises UsageError."""
    if spec is None:
        return source
    if spec.model is None:
        if not (Path(source).expanduser() / "config.json").is_file():
            raise UsageError(f"{source}/{FILE_NAME} names no model: add --model PATH|HUB_ID")
        return source
    folder = spec.model_folder(Path(source).expanduser())
    return str(folder) if folder is not None else spec.model


def bundle_model(
    source: str,
    dtype: str,
    description: str,
    task: FunctionTask | None,
    engine: EngineChoice = NATIVE,
) -> Bundle:
    """Plan and hash a checkpoint, or what `hypercast pack` made of one. Raises ImageError, DeployError."""
    if is_emulated(source):
        if engine.kind is not EngineKind.NATIVE:
            raise DeployError(f"{source} has no weights that the engine {engine.kind} could run")
        return bundle_emulated(source, dtype, description, task)
    checkpoint = checkpoint_from(source)
    folder = checkpoint.folder
    plan: PackPlan | PackedPlan
    if is_packed(folder):
        plan = packed_plan(folder)
        folder = plan.assets_folder
        if dtype not in ("auto", plan.dtype):
            raise DeployError(f"{source} is packed as {plan.dtype}: pack it again with --dtype {dtype}")
    else:
        plan = plan_checkpoint(folder, dtype, engine.kind)
    found = task_of(plan.config, engine.kind)
    if task is not None and task is not found:
        raise DeployError(f"{plan.architecture} has the task {found}, not the task {task}")
    if task is None and (whole := dropped_head(plan.config)):
        raise DeployError(f"{whole} is not supported; to use its encoder for embeddings, add --task {found}")
    bundle = bundle_image(
        plan,
        found,
        plan.dtype,
        context_length_of(plan.config, engine.kind),
        collect_assets(folder) | dict(engine.adapters),
        description,
    )
    return replace(
        bundle,
        source=checkpoint.hub_id or checkpoint.url,
        revision=checkpoint.commit,
        engine=engine.kind,
        engine_args=engine.arguments,
    )


def bundle_emulated(source: str, dtype: str, description: str, task: FunctionTask | None) -> Bundle:
    """Plan and hash an emulated model, which has no real weights. Raises InvalidRecord for an unknown one."""
    plan = EmulatedPlan(parse_model(source))
    if task not in (None, FunctionTask.GENERATE):
        raise DeployError(f"{source} has the task {FunctionTask.GENERATE}, not the task {task}")
    if dtype not in ("auto", plan.dtype):
        raise DeployError(f"{source} is {plan.dtype}: it has no weights that could be {dtype}")
    return bundle_image(
        plan, FunctionTask.GENERATE, plan.dtype, plan.context_length, plan.assets, description
    )


def bundle_image(
    plan: ImagePlan,
    task: FunctionTask,
    dtype: str,
    context_length: int,
    files: dict[str, bytes],
    description: str,
) -> Bundle:
    """Hash an image and combine it with its small files. Raises DeployError for a damaged packed image."""
    with byte_meter("hashing", plan.nbytes) as meter:
        manifest = hash_image(plan, meter.reach)
    if isinstance(plan, PackedPlan) and manifest != plan.manifest:
        raise DeployError(f"{plan.path} is damaged: its image does not match its manifest")
    encoded = encode_manifest(manifest)
    digest = manifest_digest(encoded)
    assets, blobs = named_blobs(files)
    return Bundle(
        task=task,
        architecture=plan.architecture,
        dtype=dtype,
        context_length=context_length,
        image=manifest.sha256,
        manifest=digest,
        image_bytes=manifest.nbytes,
        assets=assets,
        description=description,
        plan=plan,
        blobs={**blobs, digest: encoded},
    )


def bundle_handler(folder: Path, spec: FunctionSpec) -> Bundle:
    """Collect every file in the folder of a handler."""
    assert spec.handler is not None
    if builtin_yaml(str(folder)):
        files = {FILE_NAME: builtin_yaml(str(folder)).encode()}
    else:
        files = {str(path.relative_to(folder)): path.read_bytes() for path in handler_files(folder)}
    if not spec.handler.builtin and spec.handler.file not in files:
        raise DeployError(f"{folder}: function.yaml names {spec.handler.file}, which does not exist")
    size = sum(map(len, files.values()))
    if size > MAX_HANDLER_BYTES:
        raise DeployError(f"{folder}: its files have {size} bytes, over the limit of {MAX_HANDLER_BYTES}")
    assets, blobs = named_blobs(files)
    return Bundle(
        task=FunctionTask.HANDLER,
        architecture=BUILTIN_PREFIX + spec.handler.function if spec.handler.builtin else "handler",
        assets=assets,
        description=spec.description,
        blobs=blobs,
    )


def handler_files(folder: Path) -> Iterator[Path]:
    """Yield the regular files below `folder`, sorted, without caches and names that begin with a dot.

    These often hold secrets. Raises DeployError for a link.
    """
    for root, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name != SKIPPED and name[0] != ".")
        for name in sorted(name for name in names if name[0] != "."):
            path = Path(root) / name
            if path.is_symlink():
                raise DeployError(f"{path} is a link; a handler's files must be regular files")
            if path.suffix != ".pyc":
                yield path


def named_blobs(files: dict[str, bytes]) -> tuple[dict[str, str], dict[str, bytes]]:
    """Return files as {name: digest} and {digest: bytes}."""
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    return digests, {digests[name]: content for name, content in files.items()}
