"""HTTP below the application.

- `access_log`: one line a request
- `audit_file`: the file of the audit log
- `collectors`: histograms and counters of metrics
- `connections`: the bound on open connections
- `bounded_reads`: reads of many ledger records, one at a time
- `disconnect`: cancellation when a client leaves
- `drain`: the in-flight limit and the drain
- `held_requests`: requests that wait for an instance
- `job_metrics`: metrics of jobs, batches and webhooks
- `limits`: bounds on bodies, JSON decoding
- `metrics`: Prometheus metrics
- `metrics_listener`: the HTTP server of --metrics-port
- `multipart`: forms with one file, as they arrive
- `pieces`: JSON arrays of any length, in turns
- `protocol`: HTTP/1.1 with a bounded head
- `responses`: JSON responses
- `server`: uvicorn with a drain
- `sse`: server-sent events
- `tenant_metrics`: metrics by tenant
- `tls`: TLS on the HTTP port
- `vllm_metrics`: metrics by vLLM's names
"""
