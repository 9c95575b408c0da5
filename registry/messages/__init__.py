"""Messages of the gateway-invoker channel.

- `arrivals`: what is arriving on a node, for those that watch a load
- `base`: the base class of all messages
- `forward`: requests that pass through to another engine
- `images`: where images are, loading and dropping them
- `live`: pipelines, stages and calls that move between nodes
- `node`: instances, calls, logs and status
- `sampling`: how the tokens of a sequence are sampled
- `trace`: the trace that a request belongs to
"""
