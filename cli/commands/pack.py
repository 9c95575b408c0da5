"""`pack`: make a model image on disk, without a gateway."""

from pathlib import Path

import click

from cli.errors import DeployError
from cli.options import output_option
from cli.output import emit_record
from cli.progress import byte_meter
from registry.errors import ImageError
from registry.function_yaml import DTYPES
from registry.images.manifest import default_blocks
from registry.images.pack import pack_to_folder
from registry.images.plan import plan_checkpoint
from registry.images.source import checkpoint_from


@click.command("pack")
@click.argument("source", metavar="PATH|HUB_ID")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="A new folder.")
@click.option("--dtype", type=click.Choice(sorted(DTYPES)), default="auto", show_default=True)
@output_option
def pack_command(source: str, out: Path, dtype: str, form: str) -> None:
    """Pack a checkpoint into `image.bin`, `manifest.json` and its small files.

    Example: hypercast pack ./my-llama --out ./my-llama.image
    """
    try:
        folder = checkpoint_from(source)
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
        },
        form,
    )
