"""The commands of `hypercast`.

- `audit`: the audit log
- `casts`: transfers of model images between nodes
- `completion`: completion scripts of shells
- `deploy`: register a model or a handler
- `doctor`: checks of this machine
- `down`: stop a platform
- `functions`: list, describe, rollback, delete
- `gpu_time`: time of accelerators
- `invoke`: call a function
- `keys`: API keys
- `logs`: log lines of a function
- `nodes`: nodes of the cluster
- `pack`: write a model image to disk
- `plan`: plan a transfer
- `prices`: the price table
- `processes`: gateway and invoker, one process each
- `pull`: a folder that other engines load
- `scaling`: scale, warm, evict
- `secret`: the cluster's secret
- `secrets`: secrets of functions
- `share`: owners of functions, and the tenants that may call them
- `status`: the platform on one screen
- `top`: nodes, functions and casts as they change
- `up`: start a platform
- `usage`: use and cost
- `usage_bill`: use and cost of a period by day and by key
- `usage_export`: requests for other billing tools
"""
