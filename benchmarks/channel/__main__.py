"""Run the benchmark: `python -m benchmarks.channel`."""

from benchmarks.channel.command import main

if __name__ == "__main__":
    main()
