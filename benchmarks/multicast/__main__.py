"""Run the benchmark: `python -m benchmarks.multicast`."""

from benchmarks.multicast.command import main

if __name__ == "__main__":
    main()
