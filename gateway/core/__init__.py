"""Types, errors and settings shared by the whole gateway.

- `audit_writer`: entries of the audit log
- `contract`: protocols and types between the HTTP side and the routing side
- `error_forms`: the forms of errors, by protocol
- `errors`: exceptions of the HTTP side and the error envelope
- `executors`: named thread pools, fair between tenants
- `fixed_plan`: a cast planner forced by a flag
- `ids`: request and call ids
- `job_events`: events of jobs, for those who wait
- `node_demand`: how many nodes each pool has, lacks and does not need
- `open_call`: a call in progress, under its deadlines
- `prefix`: the beginning that prompts share
- `request_context`: the context of one HTTP request
- `request_trace`: the trace of a request
- `rights`: what the roles of keys may do
- `settings`: flags of the gateway process
- `validation`: messages for schema violations
"""
