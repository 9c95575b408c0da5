"""Run the benchmark: `python -m benchmarks.load`."""

from benchmarks.load.command import main

if __name__ == "__main__":
    main()
