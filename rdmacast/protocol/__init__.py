"""The region protocol: frames, handshake, TLS, the requesting end of a link.

- `client_link`: the requesting end of a link
- `connection`: authenticated TCP connections
- `frames`: the frames
- `framing`: frames over a transport
- `handshake`: mutual authentication
- `keepalive`: the timeout of a silent peer
- `priority`: the priority of connections in queues with bands
- `pull_report`: timed pulls and verdicts
- `tls`: TLS contexts of a node
- `wake_threshold`: when a reader is woken
- `wire`: the format and its bounds
"""
