"""GPU time, latency and SLO on a bursty trace, by the way of scaling out: `python -m benchmarks.trace`.

- `arrivals`: the part of a trace that is sent
- `client`: sends it, and compares the ledger
- `command`: the command
- `decisions`: scaling decisions, and how soon they came
- `five_means`: attainment within five times the means of full provisioning
- `link_use`: the use of links over time
- `measures`: SLO attainment, sums over time and percentiles
- `modes`: the compared ways to scale out
- `plot`: the plot
- `records`: the record of a mode from its runs
- `run`: one run of one mode
- `scenario`: what is equal for all modes, from the options
- `synthetic`: bursty arrivals fitted to published moments
- `watch`: instances, host memory and casts over time
"""
