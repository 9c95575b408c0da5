"""The shared state in one process: the fake of `registry.redis`, and what `hypercast` tests run on.

- `audit`: the audit log
- `casts`: casts and their progress
- `jobs`: jobs, files and batches
- `ledger`: the usage ledger
- `quota`: quotas of keys
- `state`: the whole shared state
"""
