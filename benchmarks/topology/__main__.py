"""The command `python -m benchmarks.topology`."""

from benchmarks.topology.command import main

if __name__ == "__main__":
    main()
