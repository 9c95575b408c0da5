"""Run the benchmark."""

from benchmarks.stock_engines.command import main

if __name__ == "__main__":
    main()
