"""Run the benchmark: `python -m benchmarks.testbed`."""

from benchmarks.testbed.network import main

if __name__ == "__main__":
    main()
