"""`python -m tests.programs`: the programs of Debian that some tests need.

As root with apt it installs those that are missing; else it says what is missing: the tests are skipped then.
"""

import shutil
from collections.abc import Iterable

from tests.fixtures.debian import install

CHROMIUM = ("chromium", "chromedriver")
_PACKAGES = {
    "chromium": ("chromium", "fonts-dejavu-core"),
    "chromedriver": ("chromium-driver",),
    "prometheus": ("prometheus",),
    "promtool": ("prometheus",),
}


def missing(programs: Iterable[str] = tuple(_PACKAGES)) -> list[str]:
    return [program for program in programs if shutil.which(program) is None]


def reason(lacking: Iterable[str]) -> str:
    """Return why a test that needs these programs is skipped."""
    return f"there is no {' and no '.join(lacking)}: python -m tests.programs installs what is missing"


def main() -> None:
    if lacking := missing():
        install(sorted({package for program in lacking for package in _PACKAGES[program]}))
    if lacking := missing():
        print(f"tests are skipped, of the console or of dashboards: there is no {' and no '.join(lacking)}")


if __name__ == "__main__":
    main()
