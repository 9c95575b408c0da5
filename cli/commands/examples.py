"""`examples`: the example functions of this installation."""

from dataclasses import asdict, fields

import click

from cli.examples import Example, examples
from cli.options import output_option
from cli.output import emit_rows
from cli.tables import Column

FIELDS = tuple(field.name for field in fields(Example))
COLUMNS = (
    Column(field="name"),
    Column(field="needs", drop=1),
    Column(field="description", shrink=20),
    Column(field="folder", wide=True),
)


@click.command("examples")
@output_option
def examples_command(form: str) -> None:
    """List the example functions that `hypercast deploy example:NAME` deploys.

    Copy a FOLDER (-o wide) to begin a function of your own with it.

    \b
    Examples:
      hypercast examples
      hypercast examples -o wide
      hypercast deploy example:tiny-coder
    """
    emit_rows([asdict(one) for one in examples()], COLUMNS, FIELDS, form)
