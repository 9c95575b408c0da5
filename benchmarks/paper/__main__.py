"""Run the experiments or write the page: `python -m benchmarks.paper`."""

from benchmarks.paper.command import main

if __name__ == "__main__":
    main()
