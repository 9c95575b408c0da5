"""Run the benchmark: `python -m benchmarks.multicast_sim`."""

from benchmarks.multicast_sim.command import main

if __name__ == "__main__":
    main()
