"""Where the `hypercast` command begins: nothing is imported before an interrupt can end it quietly."""

from cli.interrupts import leaving_at_once


def main() -> None:
    """The console script."""
    with leaving_at_once():
        from cli.commands import main as run  # here, as it takes most of the command's first second
    run()


if __name__ == "__main__":
    main()
