"""Run the benchmark: `python -m benchmarks.engine`."""

from benchmarks.engine.command import main

if __name__ == "__main__":
    main()
