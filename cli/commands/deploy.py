"""`deploy`: register a model or a handler as a function."""

import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click

from cli.client import Client, segment
from cli.commands.rollout import check_goes_on
from cli.commands.share import VISIBILITY, access_body
from cli.errors import (
    AuthError,
    CliError,
    DeployError,
    ForbiddenError,
    MissingError,
    TimeoutExceeded,
    UsageError,
)
from cli.examples import example_folder
from cli.options import DURATION, NAME, client_options, output_option, scaling_options
from cli.output import emit_record
from cli.progress import byte_meter, note, waiting
from cli.upload.blobs import Source, memory_source, upload
from cli.upload.bundle import (
    NATIVE,
    Bundle,
    EngineChoice,
    bundle_handler,
    bundle_model,
    model_source,
    read_spec,
)
from cli.upload.packed import is_packed
from cli.values import human_bytes, source_at
from registry.config.emulation import is_emulated
from registry.config.engine_args import check_vllm_args, split_engine_args
from registry.config.function_yaml import DTYPES, FILE_NAME, FunctionSpec
from registry.errors import ImageError, InvalidRecord
from registry.images.adapters import read_adapters
from registry.images.plan import image_chunks
from registry.images.source import at_revision, local_folder
from registry.records.engine import EngineKind
from registry.records.function import (
    FunctionTask,
    Scaling,
    ScalingMode,
    check_applies,
    check_name,
    check_policy,
    policy_of,
)

_REGISTERED = (
    *("task", "architecture", "image", "manifest", "assets", "dtype", "context_length", "description"),
    *("engine", "engine_args"),
)
RESULT = ("name", "version", "image", "bytes", "blocks", "previous_version", "previous_architecture")

ENGINES = [kind.value for kind in EngineKind]
TASKS = [task.value for task in FunctionTask if task is not FunctionTask.HANDLER]


@click.command("deploy")
@click.argument("source", metavar="PATH|HUB_ID[@REVISION]|URL")
@click.option(
    "--name", type=NAME, help="Name of the function.  [default: from function.yaml, else of the source]"
)
@click.option("--min-instances", type=int, help="Instances that always run.  [default: 0]")
@click.option("--max-instances", type=int, help="Most instances at once.  [default: one per node]")
@click.option(
    "--target-concurrency",
    type=int,
    help="Scale for so many concurrent requests per instance.  [default: 8]",
)
@scaling_options
@click.option(
    "--keep-alive", "keep_alive_s", type=DURATION, help="Idle time before an instance stops.  [default: 60s]"
)
@click.option(
    "--dtype", type=click.Choice(sorted(DTYPES)), help="Convert weights to this type.  [default: as stored]"
)
@click.option(
    "--model", metavar="PATH|HUB_ID[@REVISION]", help="Checkpoint for a function.yaml that names none."
)
@click.option(
    "--revision", help="Branch, tag or commit of the hub id, pinned as a commit.  [default: its main branch]"
)
@click.option(
    "--task", type=click.Choice(TASKS), help="Task of the model.  [default: that of its architecture]"
)
@click.option("--engine", type=click.Choice(ENGINES), help="What runs the model.  [default: native]")
@click.option(
    "--engine-args",
    metavar="ARGS",
    help="Arguments of vLLM's server, such as '--max-model-len 4096'.",
)
@click.option(
    "--lora",
    multiple=True,
    metavar="NAME=FOLDER",
    help="LoRA adapter, called as FUNCTION/NAME, with --engine vllm (repeatable).",
)
@click.option("--description", help="Free-text description.")
@click.option(
    "--owner", metavar="TENANT", help="Tenant that it belongs to (admin keys).  [default: the operator]"
)
@click.option(
    "--visibility",
    type=VISIBILITY,
    help="Let all tenants call it, or its owner and named ones.  [default: public if the operator's, "
    "else private]",
)
@click.option(
    "--share",
    multiple=True,
    metavar="TENANT[,TENANT]|all",
    help="Let these tenants call it, too (repeatable).",
)
@click.option("--force", is_flag=True, help="Replace a function that has another task.")
@click.option("--no-traffic", is_flag=True, help="Leave the current version current: see `rollout`.")
@click.option(
    "--wait-healthy",
    is_flag=True,
    help="Let calls switch only once an instance is ready; leave all as it is if none gets so.",
)
@output_option
@client_options
def deploy_command(
    source: str,
    name: str | None,
    dtype: str | None,
    model: str | None,
    revision: str | None,
    task: str | None,
    engine: str | None,
    engine_args: str | None,
    lora: tuple[str, ...],
    description: str | None,
    owner: str | None,
    visibility: str | None,
    share: tuple[str, ...],
    force: bool,
    no_traffic: bool,
    wait_healthy: bool,
    form: str,
    client: Client,
    **settings: Any,
) -> None:
    """Deploy a model or a handler as a function.

    The source is a checkpoint folder, a Hugging Face hub id, a URL (hf://, s3://, gs://, file://), a folder
    that `hypercast pack` wrote, a folder with a function.yaml, or example:NAME (`hypercast examples`).
    Returns when the image is stored and one node has it in memory. Deploying to an existing name makes a new
    version, to which calls switch without a failed request.

    With --wait-healthy an instance of the new version is started first, and calls switch when it is ready. If
    it does not get ready, the command fails (5) and the version before stays current.

    What a key of the role `deployer` deploys belongs to its tenant and is private to it, unless it is shared;
    what an admin key deploys is the operator's and public. A redeploy keeps owner and sharing.

    \b
    Examples:
      hypercast deploy example:tiny-coder
      hypercast deploy ./my-llama --name my-llama --keep-alive 5m
      hypercast deploy some-org/some-model --dtype bfloat16
      hypercast deploy some-org/some-model@v1.2
      hypercast deploy ./my-llama --name my-llama --wait-healthy
      hypercast deploy ./my-llama --name my-llama --no-traffic
      hypercast deploy s3://models/my-llama --name my-llama
      hypercast deploy some-org/some-model --engine vllm --engine-args '--max-model-len 8192'
      hypercast deploy ./my-llama --engine vllm --lora sql=./sql-adapter
      hypercast deploy functions/echo --share globex,initech
      hypercast deploy builtin:echo --share all
      hypercast deploy functions/embed --model ./my-bert
      hypercast deploy emulated:llama2-13b/1000 --name thirteen
    """
    source = example_folder(source)
    access = access_body(owner, visibility, share)
    if no_traffic and wait_healthy:
        raise UsageError("--wait-healthy lets calls switch, and --no-traffic does not: choose one")
    try:
        spec = read_spec(source)
        chosen = name or (spec and spec.name) or default_name(source)
        scaling = scaling_given(spec, settings)  # refused before anything is read or sent
        runs = engine_given(spec, engine, engine_args, lora)
        bundle = make_bundle(source, spec, model, task, dtype, description, revision, runs)
        check_policy(scaling, bundle.task)
    except ImageError as exc:
        raise DeployError(str(exc)) from exc
    except InvalidRecord as exc:
        raise UsageError(str(exc)) from exc
    try:
        if not force:
            check_task(client, chosen, str(bundle.task), bundle.architecture)
        send(client, bundle)
        body = registration(chosen, bundle, scaling) | ({"replace_task": True} if force else {})
        body |= {"access": access} if access else {}
        body |= {"make_current": False} if no_traffic or wait_healthy else {}
        with waiting("registering; loading the first copy into host memory"):
            made = client.json("POST", "/admin/functions", json=body)
        if wait_healthy:
            switch_when_healthy(client, made)
    except (AuthError, TimeoutExceeded, UsageError, DeployError):
        raise
    except CliError as exc:
        raise DeployError(str(exc)) from exc
    emit_record({key: made[key] for key in RESULT if key in made}, form, deployed(made, bundle))
    note(added(made) if no_traffic else switched(made))


def switch_when_healthy(client: Client, made: dict[str, Any]) -> None:
    """Let calls switch to a version once an instance of it is ready. Raises DeployError if none gets so."""
    version, path = made["version"], f"/admin/functions/{segment(made['name'])}"
    with waiting(f"starting an instance of version {version}"):
        if made.get("previous_version") in (None, version):  # it is current already
            instances = client.json("GET", path)["instances"]
            if not any(one["version"] == version and one["state"] == "ready" for one in instances):
                client.request("POST", f"{path}/scale", json={"instances": 1, "wait": True})
            return
        body = {"to": version, "percent": 0, "wait": True}
        check_goes_on(client.json("POST", f"{path}/rollout", json=body))
        client.json("POST", f"{path}/rollout/promote")


def default_name(source: str) -> str:
    """Return a name made of a hub id's or a folder's. Raises ImageError, UsageError."""
    if not is_emulated(source):
        folder = local_folder(source)
        if folder is not None and not (folder / "config.json").is_file() and not is_packed(folder):
            raise DeployError(
                f"{source} is not a model: it has no config.json, no {FILE_NAME}, "
                "and was not written by `hypercast pack`"
            )
        last = (folder.resolve() if folder is not None else Path(source.partition("@")[0])).name
        name = re.sub(r"[^a-z0-9]+", "-", last.lower()).strip("-")
        try:
            return check_name(name)
        except InvalidRecord:
            pass
    raise UsageError(f"name the function with --name: {source!r} does not give it one")


def scaling_given(spec: FunctionSpec | None, flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that flags and function.yaml give; the gateway chooses the others.

    Raises InvalidRecord.
    """
    given = {} if spec is None else {name: getattr(spec.scaling, name) for name in spec.given}
    given |= {name: value for name, value in flags.items() if value is not None}
    Scaling(**given)
    check_applies(given, policy_of(given, ScalingMode.LOAD))
    return given


def engine_given(
    spec: FunctionSpec | None, engine: str | None, engine_args: str | None, lora: Sequence[str]
) -> EngineChoice:
    """Return the engine with its arguments and adapters; flags come before function.yaml.

    Raises InvalidRecord, CheckpointError.
    """
    of_spec = spec.engine if spec is not None else None
    kind = EngineKind(engine) if engine else of_spec or EngineKind.NATIVE
    if kind is EngineKind.NATIVE and (engine_args is not None or lora):
        raise InvalidRecord("--engine-args and --lora are for another engine: add --engine vllm")
    arguments = spec.engine_args if spec is not None and kind is of_spec else ()
    if engine_args is not None:
        arguments = check_vllm_args(split_engine_args(engine_args))
    return EngineChoice(kind=kind, arguments=arguments, adapters=adapters_given(lora))


def adapters_given(lora: Sequence[str]) -> dict[str, bytes]:
    """Return the files of the adapters. Raises InvalidRecord, CheckpointError."""
    folders: dict[str, Path] = {}
    for given in lora:
        name, equals, folder = given.partition("=")
        if not (name and equals and folder) or name in folders:
            raise InvalidRecord(f"--lora {given}: give NAME=FOLDER, each name once")
        folders[name] = Path(folder).expanduser()
    return read_adapters(folders)


def check_task(client: Client, name: str, task: str, architecture: str) -> None:
    """Raise DeployError where `name` is a function with another task, before anything is uploaded."""
    try:
        current = client.json("GET", f"/admin/functions/{segment(name)}")["current"]
    except (MissingError, ForbiddenError):
        return
    if current["task"] != task:
        raise DeployError(
            f"{name} has the task {current['task']} ({current['architecture']}), and {architecture} has the "
            f"task {task}: its callers would break. Choose another --name, or replace it with --force."
        )


def deployed(made: dict[str, Any], bundle: Bundle) -> list[tuple[str, str]]:
    """Return the labelled values of a deployed version."""
    shown = [("Name", made["name"]), ("Version", str(made["version"]))]
    if bundle.source:
        shown.append(("Source", source_at(bundle.source, bundle.revision)))
    if made["image"]:
        shown.append(("Image", made["image"]))
        shown.append(("Size", f"{human_bytes(made['bytes'])} in {made['blocks']} blocks"))
    return shown


def added(made: dict[str, Any]) -> str:
    """Return which version was added, and which is current."""
    before = made.get("previous_version")
    if before in (None, made["version"]):
        return switched(made)
    return f"{made['name']}: version {made['version']} added (version {before} stays current)"


def switched(made: dict[str, Any]) -> str:
    """Return which version is current now, and which was before."""
    text = f"{made['name']}: version {made['version']}"
    if made.get("previous_version") is None:
        return f"{text} (new)"
    return f"{text} (was {made['previous_version']}, {made['previous_architecture']})"


def make_bundle(
    source: str,
    spec: FunctionSpec | None,
    model: str | None,
    task: str | None,
    dtype: str | None,
    description: str | None,
    revision: str | None,
    engine: EngineChoice,
) -> Bundle:
    """Collect what to upload for `source`; flags come before its function.yaml."""
    if spec is not None and spec.handler is not None:
        if model is not None or task is not None or revision is not None or engine != NATIVE:
            raise UsageError("a function with a handler has no --model, --revision, --task or --engine")
        return bundle_handler(Path(source).expanduser(), spec)
    return bundle_model(
        at_revision(model or model_source(source, spec), revision),
        dtype or (spec.dtype if spec else "auto"),
        description or (spec.description if spec else ""),
        FunctionTask(task) if task else spec.task if spec else None,
        engine,
    )


def registration(name: str, bundle: Bundle, scaling: dict[str, Any]) -> dict[str, Any]:
    """Return the body of the request that registers a version."""
    pinned = {"source": bundle.source, "revision": bundle.revision} if bundle.source else {}
    body = {"name": name, "scaling": scaling, **pinned}
    return body | {field: getattr(bundle, field) for field in _REGISTERED}


def send(client: Client, bundle: Bundle) -> None:
    """Upload the blobs that the store lacks."""
    sources: dict[str, Source] = {digest: memory_source(blob) for digest, blob in bundle.blobs.items()}
    if bundle.image is not None and bundle.plan is not None:
        # Packed while it is sent.
        packed = partial(image_chunks, bundle.plan)
        sources[bundle.image] = Source(bundle.plan.nbytes, lambda offset: map(bytes, packed(offset)))
    answer = client.json("POST", "/admin/blobs/missing", json={"digests": sorted(sources)})
    missing = [digest for digest in sources if digest in set(answer["missing"])]
    total = sum(sources[digest].nbytes for digest in missing)
    if not missing:
        note("nothing to upload: the store has it all already")
        return
    with byte_meter("uploading", total) as meter:
        for digest in missing:
            upload(client, digest, sources[digest], meter)
