"""Metering of accelerator time, and the journal that survives a crash.

- `accounts`: running totals of instances and calls
- `events`: journal records
- `intervals`: splits an account's time into ledger intervals
- `journal`: the append-only journal file
- `meter`: attributes accelerator time to instances and calls
- `replay`: rebuilds unsent ledger records from a journal
"""
