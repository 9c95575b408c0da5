"""`secret`: the secret by which the processes of a cluster authenticate each other."""

from pathlib import Path

import click

from cli.progress import note
from registry.config.rotation import finish_rotation, rotate_secret


@click.group("secret")
def secret_command() -> None:
    """Rotate the secret of the cluster, without a restart.

    \b
    Example:
      hypercast secret rotate --secret-file data/cluster.secret
    """


@secret_command.command("rotate")
@click.option("--secret-file", type=click.Path(path_type=Path), required=True, help="File to change.")
@click.option("--finish", is_flag=True, help="Drop the former secret.")
def rotate(secret_file: Path, finish: bool) -> None:
    """Put a new secret before the present one, then drop the former with --finish.

    Running gateways and nodes read the file again with their next connection. Between the two steps both
    secrets are valid, so the files of a cluster may change one after the other.

    \b
    Examples:
      hypercast secret rotate --secret-file data/cluster.secret
      hypercast secret rotate --secret-file data/cluster.secret --finish
    """
    if finish:
        finish_rotation(secret_file)
        note(f"{secret_file} has the new secret only. Now copy it to the cluster's other machines again:")
        note("until then the former one is valid there. Connections that are open stay open.")
        return
    rotate_secret(secret_file)
    note(f"{secret_file} has a new secret and the former one; both are valid. Now")
    note("1. copy the file to the cluster's other machines, in place of theirs;")
    note("2. restart processes that have HYPERCAST_CLUSTER_SECRET, with the first line as its value;")
    note("3. if functions have secrets: hypercast secrets reencrypt")
    note(f"4. once all have it: hypercast secret rotate --secret-file {secret_file} --finish")
