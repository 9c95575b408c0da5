"""The entry point of the `hypercast` command: imports come after interrupts are handled."""

from cli.interrupts import leaving_at_once


def main() -> None:
    """Run the command; the console script."""
    with leaving_at_once():
        from cli.group import main as run  # here, as it takes most of the command's first second
    run()


if __name__ == "__main__":
    main()
