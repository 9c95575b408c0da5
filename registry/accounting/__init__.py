"""Usage reports, prices, and reconciliation of the ledger (pure, but for the readers of a ledger).

- `gpu_report`: GPU time over time: allocated, used, loading, idle, lost
- `gpu_shares`: the attribution of an interval's busy time to tenants
- `instance_account`: one instance in the ledger: its intervals and calls
- `ledger_pages`: readers of all records of a kind, page by page
- `presence`: the time during which a node held an instance
- `prices`: the default price table
- `reconciliation`: the comparison of metered busy time with recorded usage
- `row_order`: the order of rows, and positions in it
- `tables`: rows as CSV and Parquet
- `usage_chunks`: chunks of records that are added up by any field
- `usage_groups`: sums over request records by any property
- `usage_reader`: reports over a ledger
- `usage_report`: sums over request records by function, tenant and day
"""
