"""The ASGI application and its handlers.

- `admin_archive`: the archive of the usage ledger, and deletion by tenant
- `admin_audit`: the audit log
- `admin_cluster`: scale, warm, drop, logs, nodes, instances, casts
- `admin_functions`: functions
- `admin_keys`: API keys and prices
- `admin_rollouts`: rollouts of versions
- `admin_secrets`: secrets of functions
- `admin_usage`: usage reports
- `app`: the application
- `blob_collector`: deletion of unused blobs
- `bodies`: JSON bodies of the administration, and the function that a request manages
- `cast_view`: a cast as it is shown
- `function_operations`: the operations on functions, secrets and blobs
- `function_view`: a function as the API shows it
- `handlers`: the handlers of one gateway
- `operations`: the table of all operations
- `routes_embeddings`: /v1/embeddings
- `routes_functions`: the generic invoke
- `routes_generate`: completions and chat
- `routes_models`: /v1/models
- `routes_quote`: the price of a request before it runs
- `routes_system`: probes, metrics, OpenAPI
- `routes_ui`: the console's files
- `routes_watch`: the event stream of what the console shows
- `uploads`: resumable uploads of blobs
- `usage_operations`: the operations on prices and the usage ledger
"""
