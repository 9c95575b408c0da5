"""Run the benchmark: `python -m benchmarks.chaos`."""

from benchmarks.chaos.command import main

if __name__ == "__main__":
    main()
