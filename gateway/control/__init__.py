"""The control loop of a gateway, its lease, and operator requests.

- `assembly`: opens the control side of a gateway
- `cluster_lookup`: what operator requests look up in the cluster, wait for, and are refused with
- `cluster_operations`: operator requests: scale, cordon, drain, check a model, logs
- `context`: grouped dependencies of the control side
- `controller`: plans and executes actions while it holds the lease
- `daily_archive`: archives the ledger's closed days while it holds the lease
- `decisions`: publishes what the scaling policy decided
- `host_copies`: copies of images that operator requests place and remove: warm, pull, drop
- `leadership`: the controller lease
- `log_merge`: the log lines of many nodes as one stream
- `node_calls`: calls to nodes other than requests
- `node_loads`: loads of instances, as nodes report them
- `rollout_control`: changes rollouts as their candidates' health demands
"""
