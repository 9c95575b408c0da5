"""Run the benchmark: `python -m benchmarks.cast_faults`."""

from benchmarks.cast_faults.command import main

if __name__ == "__main__":
    main()
