"""Run the benchmark: `python -m benchmarks.live_picture`."""

from benchmarks.live_picture.command import main

if __name__ == "__main__":
    main()
