"""`make test-containers`: the image, the compose file and the Kubernetes manifests, run by podman.

Needs root and Debian's packages (PACKAGES), no image registry. Where it runs as root with apt, it installs
what is missing; else it names it, and skips.
"""

import os
import subprocess
import sys

from tests.containers.podman import LIMIT_S, PACKAGES, missing
from tests.fixtures.debian import install


def main(arguments: list[str]) -> int:
    """Run the tests; return their status."""
    if os.geteuid():
        return _skip("it needs root")
    if missing():
        install(missing())
    if missing():
        return _skip(f"install {' '.join(missing())} (of {' '.join(PACKAGES)})")
    chosen = arguments or ["tests/containers"]
    options = ["-q", "-s", "-m", "containers", f"--timeout={LIMIT_S:.0f}"]
    return subprocess.call([sys.executable, "-m", "pytest", *options, *chosen])


def _skip(why: str) -> int:
    print(f"SKIPPED: no container was run: {why}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
