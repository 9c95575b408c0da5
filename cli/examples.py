"""The example functions of an installation: the folder `functions` beside this package."""

from dataclasses import dataclass
from pathlib import Path

from cli.errors import MissingError
from registry.config.function_yaml import FILE_NAME, load_function_yaml

EXAMPLE_PREFIX = "example:"
FOLDER = Path(__file__).resolve().parents[1] / "functions"


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """An example function. `needs` is what its deploy or its nodes must be given, "" for nothing."""

    name: str
    description: str
    needs: str
    folder: str


def examples() -> list[Example]:
    """Return the examples by name. Raises InvalidRecord for one that is damaged."""
    return [_example(path.parent) for path in sorted(FOLDER.glob(f"*/{FILE_NAME}"))]


def example_folder(source: str) -> str:
    """Return the folder of a source `example:NAME`, any other source as it is. Raises MissingError."""
    if not source.startswith(EXAMPLE_PREFIX):
        return source
    name = source.removeprefix(EXAMPLE_PREFIX)
    for path in FOLDER.glob(f"*/{FILE_NAME}"):
        if path.parent.name == name:
            return str(path.parent)
    known = ", ".join(sorted(path.parent.name for path in FOLDER.glob(f"*/{FILE_NAME}")))
    raise MissingError(f"there is no example {name!r}; examples: {known or 'none are installed'}")


def _example(folder: Path) -> Example:
    spec = load_function_yaml(folder)
    needs = ""
    if spec.handler is not None:
        needs = "up --allow-handlers"
    elif spec.model is None:
        needs = "deploy --model PATH|HUB_ID"
    return Example(name=folder.name, description=spec.description, needs=needs, folder=str(folder))
