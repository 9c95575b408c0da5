"""Run the benchmark: `python -m benchmarks.live_serving_switch`."""

from benchmarks.live_serving_switch.command import main

if __name__ == "__main__":
    main()
