"""`python -m tests.browser`: what the tests in a browser need.

As root with apt it installs Debian's Chromium, where that is missing; else it says what is missing: the tests
are skipped then.
"""

import shutil

from tests.fixtures.debian import install


def missing() -> list[str]:
    return [program for program in ("chromium", "chromedriver") if shutil.which(program) is None]


def main() -> None:
    if missing():
        install(["chromium", "chromium-driver", "fonts-dejavu-core"])
    if lacking := missing():
        print(f"the tests of the console in a browser are skipped: there is no {' and no '.join(lacking)}")


if __name__ == "__main__":
    main()
