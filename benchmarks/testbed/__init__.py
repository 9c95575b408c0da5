"""Several hosts on one machine, with shaped links: `python -m benchmarks.testbed`.

- `hosted_platform`: a platform in a testbed
- `link_meter`: the bytes over each link over time
- `link_rate`: measures one link
- `network`: namespaces and their processes
- `plan`: the commands that make a testbed
"""
