"""Messages of the gateway-invoker channel.

- `base`: the base class of all messages
- `live`: pipelines, stages and calls that move between nodes
- `node`: instances, images, calls, logs and status
- `sampling`: how the tokens of a sequence are sampled
"""
