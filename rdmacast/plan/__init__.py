"""Transfer plans and the execution pipelines that they allow (pure).

- `pipelines`: execution pipelines over arriving nodes
- `plan`: shapes and plans
- `planners`: the planners
- `topology`: leaf switches and scale-up domains
- `transfers`: arrays of transfers
"""
