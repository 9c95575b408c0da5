"""Write the reference pages into a folder."""

import sys
from pathlib import Path

from cli.reference.pages import write_pages

if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m cli.reference FOLDER")
    write_pages(Path(sys.argv[1]))
