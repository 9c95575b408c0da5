"""Run the benchmark: `python -m benchmarks.scaleout`."""

from benchmarks.scaleout.command import main

if __name__ == "__main__":
    main()
