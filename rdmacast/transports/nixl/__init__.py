"""Reads by NIXL agents.

- `agent`: the seam to NIXL
- `exporter`: the serving end
- `memory`: the payloads
- `native`: agents by the package `nixl`
- `node`: the agents of a process
- `reader`: an agent that reads
- `transport`: the reading end
"""
