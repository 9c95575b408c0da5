"""How soon nodes serve a model that few hold: `python -m benchmarks.scaleout`.

- `client`: sends a burst and reports when tokens arrived
- `cluster`: one burst at a platform in a testbed
- `command`: the command
- `memory`: whether the images fit into memory
- `modes`: the compared ways to scale out
- `plot`: the plot
- `predicted`: throughput that the devices' profile predicts
- `profiles`: the profiles of emulated nodes by name
- `records`: records from the tokens of a burst
- `scenarios`: scenarios from the command line
- `watch`: what serves during a burst
"""
