"""Several hosts on one machine, with shaped links: `python -m benchmarks.testbed`.

- `link_rate`: measures one link
- `network`: namespaces and their processes
- `plan`: the commands that make a testbed
"""
