"""`pack`: write a model image to disk, without a gateway."""

from pathlib import Path

import click

from cli.errors import DeployError
from cli.options import output_option
from cli.output import emit_record
from cli.progress import byte_meter
from registry.config.function_yaml import DTYPES
from registry.errors import ImageError
from registry.images.manifest import default_blocks
from registry.images.pack import pack_to_folder
from registry.images.plan import plan_checkpoint
from registry.images.source import checkpoint_from


@click.command("pack")
@click.argument("source", metavar="PATH|HUB_ID[@REVISION]")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder to create.")
@click.option(
    "--dtype",
    type=click.Choice(sorted(DTYPES)),
    default="auto",
    show_default=True,
    help="Convert weights to this type (auto: as stored).",
)
@output_option
def pack_command(source: str, out: Path, dtype: str, form: str) -> None:
    """Pack a checkpoint into a folder that `hypercast deploy` accepts.

    The folder has the model image (`model.safetensors`, a standard file with the tensors in execution
    order), its checksums (`manifest.json`) and the tokenizer and configuration (`assets/`). Use it to convert
    and check a model once, and deploy it from several places.

    \b
    Examples:
      hypercast pack ./my-llama --out ./my-llama.image --dtype bfloat16
      hypercast deploy ./my-llama.image --name my-llama
    """
    try:
        checkpoint = checkpoint_from(source)
        folder = checkpoint.folder
        with byte_meter("packing", plan_checkpoint(folder, dtype).nbytes) as meter:
            packed = pack_to_folder(folder, out, dtype, meter.reach)
    except ImageError as exc:
        raise DeployError(str(exc)) from exc
    manifest = packed.manifest
    emit_record(
        {
            "image": manifest.sha256,
            "manifest": packed.manifest_digest,
            "bytes": manifest.nbytes,
            "blocks": default_blocks(manifest.nbytes),
            "units": manifest.unit_count,
            "tensors": len(manifest.tensors),
            "layers": manifest.num_layers,
            "architecture": manifest.architecture,
            "path": str(packed.path),
            "source": checkpoint.hub_id,
            "revision": checkpoint.commit,
        },
        form,
    )
