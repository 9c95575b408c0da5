"""The image: its size, its user, what it can do read-only."""

import time

import pytest

from tests.containers.conftest import note
from tests.containers.podman import IMAGE, PYTHON, Podman

pytestmark = pytest.mark.containers
LOCKED_DOWN = ("--rm", "--read-only", "--tmpfs=/tmp", "--cap-drop=ALL", "--security-opt=no-new-privileges")
MAX_OWN_BYTES = 1_600e6  # torch's CPU build is 700 MB of it


def test_the_image_is_no_larger_than_what_it_runs(podman: Podman, image: str) -> None:
    own, base = (podman.inspect(name, "image")["Size"] for name in (IMAGE, PYTHON))
    assert own - base < MAX_OWN_BYTES
    left = podman.run(
        "run", "--rm", "--entrypoint=sh", image, "-c", "ls /src /root/.cache; which gcc pip; true"
    )
    assert not left


def test_its_files_belong_to_root_and_its_folders_to_its_user(podman: Podman, image: str) -> None:
    assert podman.inspect(image, "image")["Config"]["User"] == "10001:10001"
    look = (
        "find /opt /usr /etc /var/lib/hypercast /run/hypercast-shm -writable -not -type l 2>/dev/null; true"
    )
    writable = podman.run("run", "--rm", "--entrypoint=sh", image, "-c", look)
    own = {f"/var/lib/hypercast{name}" for name in ("", "/data", "/store")}
    assert set(writable.split()) == {*own, "/run/hypercast-shm"}


@pytest.mark.parametrize("program", ["gateway", "invoker", "deploy"])
def test_programs_start_read_only_and_without_rights(program: str, podman: Podman, image: str) -> None:
    begin_s = time.monotonic()
    text = podman.run("run", *LOCKED_DOWN, "--network=none", image, program, "--help")
    note(f"hypercast {program} --help", f"{time.monotonic() - begin_s:.2f} s with the container")
    assert text.startswith("Usage: hypercast")


def test_imports_are_compiled_in_the_image(podman: Podman, image: str) -> None:
    # Python writes no bytecode into a read-only container: each start would compile everything anew.
    script = (
        "import sys, importlib.util, pathlib; import gateway.__main__, invoker.__main__; "
        "files = [m.__spec__.origin for m in sys.modules.values() if getattr(m, '__spec__', None)]; "
        "ours = [f for f in files if f and f.startswith('/opt/hypercast') and f.endswith('.py')]; "
        "cached = importlib.util.cache_from_source; "
        "print([f for f in ours if not pathlib.Path(cached(f)).exists()][:9], len(ours))"
    )
    assert podman.run("run", *LOCKED_DOWN, "--entrypoint=python", image, "-c", script).startswith("[] ")
