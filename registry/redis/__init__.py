"""The shared state and the usage ledger in Redis.

- `audit`: the audit log
- `batches`: files and batches
- `casts`: casts and their progress
- `connections`: a bounded connection pool
- `embedded`: a Redis server of the data directory
- `feed`: the change feed
- `functions`: functions and versions
- `jobs`: the queue of jobs and their webhooks
- `lease`: leases
- `ledger`: the usage ledger
- `ledger_archive`: the index of the archive, and the removal of archived rows
- `ledger_rows`: pages of rows by position
- `ledger_writer`: batched writes of request records
- `live`: live serving records
- `nodes`: nodes, instances, load reports and the snapshot
- `quota`: quotas of keys
- `scaling`: the last scaling decisions
- `sentinel`: connections to the master that Redis Sentinel names
- `state`: the whole shared state
- `store`: the base of all parts
"""
