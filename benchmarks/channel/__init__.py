"""The gateway-invoker channel beside other libraries: `python -m benchmarks.channel`.

- `command`: the command and its records
- `contenders`: the message transports
"""
