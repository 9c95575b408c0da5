"""From the usage of a request to its record in the ledger.

- `ack_batcher`: acknowledgements to nodes of calls that are in the ledger
- `outbox`: records to retry after their request has ended
- `outbox_record`: one record, written exactly once
- `request_record`: the record of a request, and its write
"""
