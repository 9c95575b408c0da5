"""Runs a shell script in a throw-away machine whose kernel has Soft-RoCE, over a view of this one's files."""

import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from tests.rdma.build_vm import build

QEMU = "qemu-system-x86_64"
MEMORY_MIB = 1536
LIMIT_S = 1800.0
NEVER_REPORTED = 250
# The least that numpy runs on; what newer processors have makes the emulation slower.
PROCESSOR = "qemu64,+ssse3,+sse4.1,+sse4.2,+popcnt,+cx16,+lahf-lm"
_PORT = 0xF4  # see `init`
_SHIFT = 16


def command(folder: Path, job: Path) -> list[str]:
    """One processor: the emulation gains nothing by a second."""
    console = f"console=ttyS0 loglevel=3 panic=-1 mitigations=off nokaslr job={job}"
    share = "local,id=files,path=/,security_model=none,readonly=on,multidevs=remap"
    return [
        *(QEMU, "-accel", "tcg,tb-size=512", "-cpu", PROCESSOR, "-machine", "q35", "-smp", "1"),
        *("-m", str(MEMORY_MIB), "-nodefaults", "-no-user-config", "-no-reboot", "-display", "none"),
        *("-kernel", str(folder / "kernel"), "-initrd", str(folder / "initrd"), "-append", console),
        *("-serial", "stdio", "-device", f"isa-debug-exit,iobase={_PORT:#x},iosize=4"),
        *("-fsdev", share, "-device", "virtio-9p-pci,fsdev=files,mount_tag=host"),
    ]


def run(script: str, folder: Path, limit_s: float = LIMIT_S) -> int:
    """Run the script; returns its exit code, or NEVER_REPORTED. Raises CannotBuild."""
    build(folder)
    with tempfile.NamedTemporaryFile("w", dir=folder, prefix="job-", suffix=".sh") as job:
        job.write(script)
        job.flush()
        guest = subprocess.Popen(
            command(folder, Path(job.name).resolve()),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            errors="replace",
        )
        late = threading.Timer(limit_s, guest.kill)
        late.start()
        try:
            said_zero = _relay(guest)
            code = guest.wait()
        finally:
            late.cancel()
            guest.kill()
            guest.wait()
    return reported(code, said_zero=said_zero)


def reported(code: int, *, said_zero: bool) -> int:
    """Return the guest's exit code by that of QEMU, which is (code + _SHIFT) << 1 | 1.

    QEMU's own failures end with 1, and a power-off with 0.
    """
    reported = (code >> 1) - _SHIFT
    if code % 2 == 0 or not 0 <= reported <= 99 or (not reported and not said_zero):
        print(f"the guest never reported (QEMU ended with {code})", file=sys.stderr)
        return NEVER_REPORTED
    return reported


def _relay(guest: "subprocess.Popen[str]") -> bool:
    """Pass on what the guest says; whether it said that all went well."""
    assert guest.stdout is not None
    said_zero = False
    for line in guest.stdout:
        sys.stdout.write(line)
        sys.stdout.flush()
        said_zero |= line.strip() == "guest: exit 0"
    return said_zero


if __name__ == "__main__":
    sys.exit(run(Path(sys.argv[1]).read_text(), Path(os.environ.get("HYPERCAST_VM", ".rdma-vm"))))
