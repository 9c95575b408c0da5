"""`make test-rdma`: the tests that need an RDMA device, in a guest whose kernel has one in software.

Needs no RDMA hardware, no rights and no KVM, but Debian's packages (PACKAGES). Where it runs as root with
apt, it installs what is missing; else it names it, and skips.
"""

import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.fixtures.debian import install
from tests.rdma.build_vm import CannotBuild
from tests.rdma.run_vm import LIMIT_S, QEMU, run

ROOT = Path(__file__).resolve().parents[2]
VM = ROOT / ".rdma-vm"
PYVERBS = Path("/usr/lib/python3/dist-packages/pyverbs")
# A file that shows that a package is installed.
PACKAGES = {
    "qemu-system-x86": lambda: shutil.which(QEMU),
    "python3-pyverbs": PYVERBS.is_dir,
    "ibverbs-providers": lambda: list(Path("/usr/lib").glob("*/libibverbs/librxe-rdmav*.so")),
    "iproute2": lambda: shutil.which("rdma", path="/usr/sbin:/sbin:/usr/bin:/bin"),
}
TESTS = ("tests/contract/test_transports.py", "tests/rdma", "-k", "verbs")


def missing() -> list[str]:
    return [name for name, is_there in PACKAGES.items() if not is_there()]


def script(arguments: Sequence[str]) -> str:
    """Return the guest's job, which sees this checkout and its Python at their paths here."""
    values = {
        "CHECKOUT": str(ROOT),
        "PYTHON": sys.executable,
        "PYVERBS": str(PYVERBS),
        "ARGUMENTS": " ".join(map(shlex.quote, arguments)),
    }
    lines = [f"{name}={shlex.quote(value)}" for name, value in values.items()]
    return "\n".join([*lines, (Path(__file__).parent / "guest.sh").read_text()])


def main(arguments: Sequence[str]) -> int:
    if sys.version_info[:2] != (3, 11):
        return _skip("Debian's pyverbs is for Python 3.11 only")
    if missing():
        install(missing())
    if missing():
        return _skip(f"install {' '.join(missing())}")
    try:
        return run(script(arguments or TESTS), VM, float(os.environ.get("HYPERCAST_RDMA_LIMIT_S", LIMIT_S)))
    except CannotBuild as error:
        return _skip(str(error))


def _skip(why: str) -> int:
    print(f"SKIPPED: no test over RDMA was run: {why}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
