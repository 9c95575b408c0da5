"""`up`: Redis, gateways and nodes on this machine."""

import asyncio
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import click

from cli import run_file
from cli.announce import announce
from cli.errors import CliError, UsageError
from cli.leftovers import SHM
from cli.logtail import tail
from cli.options import DURATION, RATE, SIZE
from cli.supervisor import Supervisor
from cli.up_settings import UpSettings, count_gpus, default_data_dir, settle, tls_files
from registry.embedded_redis import Durability

_FILE = click.Path(path_type=Path, exists=True, dir_okay=False)


@click.command("up")
@click.option("--nodes", type=int, help="How many nodes (default: one a GPU, else 2).")
@click.option("--hosts", type=int, help="Spread the nodes over so many virtual hosts.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="0: any free.")
@click.option(
    "--data-dir", type=click.Path(path_type=Path), default=default_data_dir, help="Where everything lives."
)
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda, or emulated:GPU.")
@click.option("--redis-url", help="Use this Redis instead of an embedded one.")
@click.option("--link-rate", help="Cap each node's model transfers, e.g. 1mbit (experiments only).")
@click.option("--gpu-memory", help="Accelerator arena a node, e.g. 2GiB.")
@click.option("--host-memory", help="Host tier a host, e.g. 8GiB.")
@click.option(
    "--shm-dir",
    type=click.Path(path_type=Path),
    default=SHM,
    show_default=True,
    help="Where the host tiers lie.",
)
@click.option(
    "--cast-tls-cert", type=_FILE, help="The nodes' certificate: TLS for what they read of each other."
)
@click.option("--cast-tls-key", type=_FILE, help="The certificate's key.")
@click.option("--cast-tls-ca", type=_FILE, help="The authority that made the certificate.")
@click.option("--allow-handlers", is_flag=True, help="Let functions bring their own code.")
@click.option("--meter-interval", help="How often the ledger hears of an instance, e.g. 10s (default: 60s).")
@click.option(
    "--kv-moves",
    type=click.Choice(["auto", "always", "never"]),
    help="Where a call goes on that loading nodes began: fetch its K and V, or compute them (default: auto).",
)
@click.option("--gateways", type=int, default=1, show_default=True, help="Gateways, on ports from --port on.")
@click.option(
    "--appendfsync",
    type=click.Choice(["everysec", "always"]),
    default="everysec",
    show_default=True,
    help="How soon the embedded Redis forces what it wrote to the disk.",
)
@click.option("--detach", is_flag=True, help="Return when it answers.")
@click.option("--ready-fd", type=int, hidden=True)
def up_command(
    nodes: int | None,
    hosts: int | None,
    host: str,
    port: int,
    data_dir: Path,
    device: str,
    redis_url: str | None,
    link_rate: str | None,
    gpu_memory: str | None,
    host_memory: str | None,
    shm_dir: Path,
    cast_tls_cert: Path | None,
    cast_tls_key: Path | None,
    cast_tls_ca: Path | None,
    allow_handlers: bool,
    meter_interval: str | None,
    kv_moves: str | None,
    gateways: int,
    appendfsync: Durability,
    detach: bool,
    ready_fd: int | None,
) -> None:
    """Start Redis, a gateway and nodes on this machine, and keep them running.

    \b
    Examples:
      hypercast up
      hypercast up --nodes 3 --hosts 3 --data-dir ./data --detach
      hypercast up --nodes 8 --device emulated:h800/1000/10
    """
    checked = ((link_rate, RATE), (gpu_memory, SIZE), (host_memory, SIZE), (meter_interval, DURATION))
    for value, kind in checked:
        if value is not None:
            kind.convert(value, None, None)
    settings = settle(
        nodes=nodes,
        hosts=hosts,
        host=host,
        port=port,
        data_dir=data_dir,
        device=device,
        redis_url=redis_url,
        link_rate=link_rate,
        gpu_memory=gpu_memory,
        host_memory=host_memory,
        shm_dir=shm_dir,
        allow_handlers=allow_handlers,
        meter_interval=meter_interval,
        kv_moves=kv_moves,
        gateways=gateways,
        appendfsync=appendfsync,
        gpus=count_gpus(),
        cores=len(os.sched_getaffinity(0)),
        cast_tls=tls_files(cast_tls_cert, cast_tls_key, cast_tls_ca),
    )
    prepare_data_dir(settings.data_dir)
    refuse_second(settings)
    if detach:
        start_detached(settings)
    else:
        asyncio.run(Supervisor(settings, ready_fd).run())


def prepare_data_dir(data_dir: Path) -> None:
    """Make it, and see that it can be written to. Raises CliError."""
    try:
        (data_dir / "logs").mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=data_dir):
            pass
    except OSError as exc:
        raise CliError(f"cannot write to --data-dir {data_dir}: {exc.strerror}") from exc


def refuse_second(settings: UpSettings) -> None:
    run = run_file.read(settings.data_dir)
    if run and run.process():
        raise CliError(f"already running at {run.url} from {settings.data_dir} (pid {run.pid})")


def start_detached(settings: UpSettings) -> None:
    """Run `up` again in a session of its own, and wait for its word that all is ready."""
    path = settings.data_dir / "logs" / "up.log"
    earlier_bytes = path.stat().st_size if path.exists() else 0
    reader, writer = os.pipe()
    with path.open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "cli", *without_detach(sys.argv[1:]), "--ready-fd", str(writer)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            pass_fds=(writer,),
        )
    os.close(writer)
    try:
        with os.fdopen(reader) as pipe:
            word = pipe.readline().strip()
    except KeyboardInterrupt:
        process.terminate()
        process.wait()
        raise
    if word != "ready":
        code = process.wait()
        said = tail(path, start=earlier_bytes).strip()
        if "\n" in said or not said.startswith("hypercast: "):
            said = f"it did not start:\n  {said}"
        failure = UsageError if code == UsageError.exit_code else CliError
        raise failure(said.removeprefix("hypercast: "))
    run = run_file.read(settings.data_dir)
    assert run is not None
    announce(settings, run.urls)


def without_detach(arguments: list[str]) -> list[str]:
    return [argument for argument in arguments if argument != "--detach"]
