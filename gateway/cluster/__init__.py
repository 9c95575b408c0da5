"""The gateway's cached state of the cluster and its channels to nodes.

- `backoff`: the backoff table of failed starts and copies
- `cast_cache`: the latest casts
- `cast_tracker`: when casts end
- `condition`: an asynchronous condition with callbacks
- `context`: the shared state and what follows it, as one dependency
- `dialer`: the real channel to a node
- `entries`: entries of the state cache
- `link_estimates`: the link rates that a transfer plan is based on
- `link_rates`: link rates measured by finished casts
- `live_cache`: live serving state of each version
- `node_channels`: a channel to every node, redialled with backoff
- `node_client`: protocols of a channel to a node
- `node_index`: usable nodes by image, host, kind and free arena space
- `node_space`: what a node holds, and its space for more
- `replicas`: what calls can be sent to, instances and pipelines
- `start_assets`: manifests and small files that a start needs
- `state_cache`: the cluster state, a fold of the change feed
- `sync`: keeps the state cache up to date
- `traffic_sums`: what all gateways together have served
"""
