"""`deploy`: register a model or a handler as a function."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from cli.bundle import Bundle, bundle_handler, bundle_model, model_source, read_spec
from cli.client import Client
from cli.errors import AuthError, CliError, DeployError, TimeoutExceeded, UsageError
from cli.options import DURATION, LIVE, NAME, client_options, connect, output_option
from cli.output import emit_record
from cli.progress import byte_meter, human_bytes, note
from cli.upload import MemorySource, Source, upload
from registry.emulation import is_emulated
from registry.errors import ImageError, InvalidRecord
from registry.function import Scaling
from registry.function_yaml import DTYPES, FunctionSpec
from registry.images.plan import ImagePlan
from registry.images.source import local_folder
from registry.live import Live


class ImageSource(Source):
    """A model image, packed while it is sent."""

    def __init__(self, plan: ImagePlan) -> None:
        super().__init__(plan.nbytes)
        self._plan = plan

    def chunks(self, offset: int) -> Iterator[bytes]:
        for view in self._plan.chunks(offset):
            yield bytes(view)


@click.command("deploy")
@click.argument("source", metavar="PATH|HUB_ID")
@click.option("--name", type=NAME, help="The function's name (default: function.yaml's).")
@click.option("--min-instances", type=int, help="Instances that always run (default 0).")
@click.option("--max-instances", type=int, help="At most so many (default: one a node).")
@click.option(
    "--target-concurrency", type=int, help="Requests an instance before another starts (default 8)."
)
@click.option("--keep-alive", type=DURATION, help="Idle time before an instance stops (default 60s).")
@click.option("--live", type=LIVE, help="Serve while the model arrives (default auto).")
@click.option("--ttft-target", type=DURATION, help="First token that --live auto tries to keep (default 1s).")
@click.option("--dtype", type=click.Choice(sorted(DTYPES)), help="Convert weights (default: as stored).")
@click.option("--model", metavar="PATH|HUB_ID", help="The checkpoint of a function.yaml that names none.")
@click.option("--description", help="For people.")
@output_option
@client_options
def deploy_command(
    source: str,
    name: str | None,
    min_instances: int | None,
    max_instances: int | None,
    target_concurrency: int | None,
    keep_alive: float | None,
    live: str | None,
    ttft_target: float | None,
    dtype: str | None,
    model: str | None,
    description: str | None,
    form: str,
    url: str | None,
    api_key: str | None,
) -> None:
    """Register a checkpoint folder, a hub id or a handler's folder as a function.

    Returns when the image is stored and one node holds it in memory. Deploying again makes a new
    version and switches to it without a failed request.

    \b
    Examples:
      hypercast deploy ./my-llama --name my-llama --keep-alive 5m
      hypercast deploy functions/echo
      hypercast deploy builtin:echo
      hypercast deploy functions/embed --model ./my-bert
      hypercast deploy some-org/some-model --name m --dtype bfloat16
      hypercast deploy emulated:llama2-13b/1000 --name thirteen
    """
    given = {
        "min_instances": min_instances,
        "max_instances": max_instances,
        "target_concurrency": target_concurrency,
        "keep_alive_s": keep_alive,
        "live": None if live is None else Live(live),
        "ttft_target_s": ttft_target,
    }
    scaling: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
    try:
        spec = read_spec(source)
        chosen = name or (spec.name if spec else None)
        if chosen is None:
            if not is_emulated(source):
                local_folder(source)  # a name would not help where there is none
            raise UsageError("give the function a name with --name")
        if spec is not None:
            scaling = {**spec_scaling(spec), **scaling}
        Scaling(**scaling)  # refuse what cannot be before anything is read or sent
        bundle = make_bundle(source, spec, model, dtype, description)
    except ImageError as exc:
        raise DeployError(str(exc)) from exc
    except InvalidRecord as exc:
        raise UsageError(str(exc)) from exc
    try:
        with connect(url, api_key) as client:
            send(client, bundle)
            note("registering; waiting for a first copy in host memory")
            made = client.json("POST", "/admin/functions", json=registration(chosen, bundle, scaling))
    except (AuthError, TimeoutExceeded, UsageError, DeployError):
        raise
    except CliError as exc:
        raise DeployError(str(exc)) from exc
    emit_record(
        {key: made[key] for key in ("name", "version", "image", "bytes", "blocks") if key in made}, form
    )


def make_bundle(
    source: str, spec: FunctionSpec | None, model: str | None, dtype: str | None, description: str | None
) -> Bundle:
    """What to send for `source`; its function.yaml, if any, gives what no flag says."""
    if spec is not None and spec.handler is not None:
        if model is not None:
            raise UsageError("a function with a handler has no --model")
        return bundle_handler(Path(source).expanduser(), spec)
    return bundle_model(
        model or model_source(source, spec),
        dtype or (spec.dtype if spec else "auto"),
        description or (spec.description if spec else ""),
        spec.task if spec else None,
    )


def spec_scaling(spec: FunctionSpec) -> dict[str, Any]:
    return {
        "min_instances": spec.scaling.min_instances,
        "max_instances": spec.scaling.max_instances,
        "target_concurrency": spec.scaling.target_concurrency,
        "keep_alive_s": spec.scaling.keep_alive_s,
        "host_keep_alive_s": spec.scaling.host_keep_alive_s,
        "live": spec.scaling.live,
        "ttft_target_s": spec.scaling.ttft_target_s,
    }


def registration(name: str, bundle: Bundle, scaling: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": name,
        "task": str(bundle.task),
        "architecture": bundle.architecture,
        "image": bundle.image,
        "manifest": bundle.manifest,
        "assets": bundle.assets,
        "dtype": bundle.dtype,
        "context_length": bundle.context_length,
        "scaling": scaling,
        "description": bundle.description,
    }


def send(client: Client, bundle: Bundle) -> None:
    """Upload what the store lacks."""
    sources: dict[str, Source] = {digest: MemorySource(blob) for digest, blob in bundle.blobs.items()}
    if bundle.image is not None and bundle.plan is not None:
        sources[bundle.image] = ImageSource(bundle.plan)
    answer = client.json("POST", "/admin/blobs/missing", json={"digests": sorted(sources)})
    missing = [digest for digest in sources if digest in set(answer["missing"])]
    total = sum(sources[digest].nbytes for digest in missing)
    if not missing:
        note("the store has it all already")
        return
    note(f"sending {human_bytes(total)} in {len(missing)} blobs")
    with byte_meter("uploading", total) as meter:
        for digest in missing:
            upload(client, digest, sources[digest], meter)
