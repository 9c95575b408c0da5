"""Records of the shared state.

- `api_key`: API keys and their limits
- `archive`: the index of the ledger's archive
- `audit`: the audit log
- `batch`: files and batches
- `cast`: casts, their members and progress
- `change`: the change feed and the snapshot
- `engine`: which engine runs a model
- `fence`: the order of the holders of a lease
- `function`: functions and their versions
- `function_changes`: deploy, rollback and scaling as pure decisions
- `hook`: webhooks to deliver
- `instance`: instances and their life cycle
- `job`: jobs, which run later, and their results
- `job_counts`: how many jobs and batches there are
- `live`: serving while a model is loading
- `node`: nodes and their cached images
- `quota`: rate limits, concurrency leases and spend limits
- `rollout`: rollouts of versions, and which requests go where
- `rollout_changes`: begin, change and end of a rollout as pure decisions
- `scaling`: the last scaling decision of a function
- `schema`: versions of the records' schema
- `secret`: secrets of functions, encrypted
- `usage`: request records, intervals and prices
"""
