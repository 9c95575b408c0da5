"""`python -m tests.browser`: what the tests in a browser need.

As root with apt it installs Debian's Chromium, where that is missing; else it says what is missing: the tests
are skipped then.
"""

import os
import shutil
import subprocess


def missing() -> list[str]:
    return [program for program in ("chromium", "chromedriver") if shutil.which(program) is None]


def main() -> None:
    if missing() and not os.geteuid() and shutil.which("apt-get"):
        print("installing chromium", flush=True)
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        options = ["-q", "-y", "--no-install-recommends", "-o", "DPkg::Lock::Timeout=300"]
        names = ["chromium", "chromium-driver", "fonts-dejavu-core"]
        for command in (["apt-get", "update", "-q"], ["apt-get", "install", *options, *names]):
            subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=False)
    if lacking := missing():
        print(f"the tests of the console in a browser are skipped: there is no {' and no '.join(lacking)}")


if __name__ == "__main__":
    main()
