"""What benchmarks share: platforms, child processes, clients, models and records.

- `admin_client`: a client of the admin routes, and waits for what they report
- `arenas`: a node's arena on any device
- `arguments`: command-line parsing and value types
- `crew`: the child protocol: processes that take orders, the benchmark's end
- `crew_member`: the child's end
- `crew_messages`: the messages between the two
- `event_stream`: events of streamed completions
- `feed_monitor`: monitors of the state and its change feed
- `figures`: figures and tables in Markdown from result files
- `forked_cluster`: the cluster starter without gateways: Redis, and nodes forked from one process
- `http_exchange`: one HTTP request on a connection of its own
- `ledger_check`: a ledger compared with a client's view
- `local_platform`: the cluster starter: `hypercast up`, kills, processes
- `node_launcher`: the process that forks them, on request in a network namespace
- `no_server`: a region server that no node reads from
- `open_loop`: a client that sends each request at its time
- `owner`: names and folders that are removed after a killed run
- `percentile`: percentiles
- `processes`: child processes that end with the benchmark
- `processor`: CPU time of the machine, descriptors of a process
- `random_llama`: a random checkpoint on disk
- `random_model`: a random model in memory
- `records`: records of a run: provenance, printing, writing, drawing
- `result_files`: values in result files, by expression
- `rival_nodes`: what nodes of other systems have
- `stream_client`: a light client of streamed completions
- `traces`: request traces
"""
