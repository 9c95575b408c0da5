"""What the harness of the guest does without one: what counts as a pass, and what it packs."""

import subprocess
from pathlib import Path

import pytest

from tests.rdma.build_vm import Cpio, unpacked
from tests.rdma.run_vm import NEVER_REPORTED, reported


@pytest.mark.parametrize(
    ("code", "said_zero", "expected"),
    [
        (33, True, 0),
        (33, False, NEVER_REPORTED),
        (35, False, 1),
        (2 * (16 + 99) + 1, False, 99),
        (0, True, NEVER_REPORTED),  # powered off
        (1, True, NEVER_REPORTED),  # QEMU itself failed
        (-9, True, NEVER_REPORTED),
        (124, True, NEVER_REPORTED),
        (255, True, NEVER_REPORTED),
    ],
)
def test_only_a_guest_that_reported_has_passed(code: int, said_zero: bool, expected: int) -> None:
    assert reported(code, said_zero=said_zero) == expected


def test_the_first_file_system_is_a_cpio_archive() -> None:
    archive = Cpio()
    archive.add("folder", 0o40755)
    archive.add("folder/file", 0o100644, b"seven b")
    packed = archive.finish()
    assert packed.startswith(b"070701") and packed.count(b"070701") == 3 and len(packed) % 4 == 0
    at = packed.index(b"folder/file\0")
    assert packed[at - 110 + 54 : at - 110 + 62] == b"%08x" % 7  # its size


def test_a_kernel_that_is_packed_in_an_unknown_way_is_used_as_it_is() -> None:
    assert unpacked(bytes(0x1000)) is None


def test_a_shell_can_read_the_scripts() -> None:
    for name in ("init", "guest.sh"):
        subprocess.run(["sh", "-n", str(Path(__file__).parent / name)], check=True)
