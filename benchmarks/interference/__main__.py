"""Run the experiment: `python -m benchmarks.interference`."""

from benchmarks.interference.command import main

if __name__ == "__main__":
    main()
