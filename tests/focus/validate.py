"""Run the published FOCUS validator as its command does; for the interpreter that has it.

It opens a file of its own relative to the folder that it is installed in, so that it runs there.
"""

import importlib.util
import os
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType
from typing import Any

# What keeps release 2.2.1 from Python 3.11: one f-string, with backslashes; and the same without.
_NEW = rb"""f"'{k.replace('\"', '\"\"')}'" for k in ignore_keys"""
_OLD = rb""""'" + k.replace('"', '""') + "'" for k in ignore_keys"""


def read_with_earlier_releases() -> None:
    """Compile that f-string as text that this Python reads."""
    compiled = SourceFileLoader.source_to_code

    def source_to_code(self: SourceFileLoader, data: Any, path: Any, *, _optimize: int = -1) -> CodeType:
        if str(path).endswith("focus_to_duckdb_converter.py"):
            assert data.count(_NEW) == 1
            data = data.replace(_NEW, _OLD)
        return compiled(self, data, path, _optimize=_optimize)

    SourceFileLoader.source_to_code = source_to_code  # type: ignore[method-assign]


def main() -> None:
    """Validate, with the arguments of the validator."""
    package = importlib.util.find_spec("focus_validator")
    assert package is not None and package.origin is not None
    os.chdir(Path(package.origin).parents[1])
    if sys.version_info < (3, 12):
        read_with_earlier_releases()
    from focus_validator.main import main as validate

    validate()


if __name__ == "__main__":
    main()
