"""Run the benchmark: `python -m benchmarks.trace_sim`."""

from benchmarks.trace_sim.command import main

if __name__ == "__main__":
    main()
