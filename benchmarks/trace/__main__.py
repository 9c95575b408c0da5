"""Run the experiment: `python -m benchmarks.trace`."""

from benchmarks.trace.command import main

if __name__ == "__main__":
    main()
