"""The shared part of gateway and invoker: records, messages, model images, state in Redis, the usage ledger.

- `accounting`: usage reports, prices, exports and reconciliation
- `aio`: asyncio helpers
- `archive`: closed days of the usage ledger as Parquet files, read together with Redis
- `channel`: the gateway-invoker channel
- `clock`: time as a parameter
- `codec`: records to JSON and back
- `config`: command-line arguments, secrets, `function.yaml`
- `errors`: exceptions of the registry
- `held_lease`: a lease that is renewed while its work goes on
- `images`: model images, manifests and the blob store
- `keys`: every Redis key and time to live
- `logs`: the format of log lines, and which request they are about
- `memory`: the shared state in one process
- `messages`: messages of the gateway-invoker channel
- `records`: records of the shared state
- `redis`: the shared state and the ledger in Redis
- `state`: protocols of the shared state
- `tracing`: spans, their sampling and their export
- `units`: durations, sizes and rates
"""
