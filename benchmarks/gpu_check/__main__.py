"""Run the benchmark: `python -m benchmarks.gpu_check`."""

from benchmarks.gpu_check.command import main

if __name__ == "__main__":
    main()
