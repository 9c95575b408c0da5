"""Run the benchmark: `python -m benchmarks.live_serving`."""

from benchmarks.live_serving.command import main

if __name__ == "__main__":
    main()
