"""Run the benchmark: `python -m benchmarks.ablation`."""

from benchmarks.ablation.command import main

if __name__ == "__main__":
    main()
