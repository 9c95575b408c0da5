"""The gateway-invoker channel: many calls over one authenticated connection.

- `client`: the gateway's end: calls and their replies
- `connection`: one end of a connection: frames, keepalive, congestion
- `frames`: the frames and their bounds
- `server`: the node's end: a handler for each call
"""
