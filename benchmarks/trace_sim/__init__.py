"""A simulation of a day of a trace at a thousand nodes: `python -m benchmarks.trace_sim`.

- `against`: the comparison with records of processes
- `arrivals`: requests of a cut of a trace, or of days made of it
- `cluster`: nodes, what they hold, and the choice of nodes
- `command`: the command and its options
- `figures`: what is counted
- `function`: a function's calls and its load
- `instance`: an instance's engine
- `modes`: the compared ways to provide instances
- `observed`: what instances were seen to do
- `platform`: arrivals, decisions, starts and stops
- `simulation`: one run from its settings
- `starts`: start times by tier
- `step_times`: step times of a profile
"""
