"""The control loop of a gateway, its lease, and operator requests.

- `assembly`: opens the control side of a gateway
- `cluster_operations`: operator requests: scale, cordon, drain, warm, drop, logs
- `context`: grouped dependencies of the control side
- `controller`: plans and executes actions while it holds the lease
- `daily_archive`: archives the ledger's closed days while it holds the lease
- `decisions`: publishes what the scaling policy decided
- `leadership`: the controller lease
- `log_merge`: the log lines of many nodes as one stream
- `node_calls`: calls to nodes other than requests
- `node_loads`: loads of instances, as nodes report them
- `rollout_control`: changes rollouts as their candidates' health demands
"""
