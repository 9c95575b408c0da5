"""The invoker: one process per node, which caches images in tiers and runs instances.

- `assembly`: the parts of a node, put together
- `device`: properties of the accelerator, and default memory sizes
- `lifetime`: the life of a node, from its start until it leaves
- `log_file`: the last log lines in a file, for the node after a kill
- `log_rings`: recent log lines of each function
- `node`: handles requests from gateways
- `publisher`: publishes the node's state to the registry
- `scratch`: scratch folders for handlers
- `serving`: runs requests on ready instances
- `settings`: command-line flags and environment
- `watchdog`: ends the process when an engine hangs
- `base`, `memory`, `host_tier`, `loading`, `instances`, `metering`: storage, life cycle and accounting
- `engine`, `emulated`, `handlers`: what runs models and user code
- `traces`: the spans of calls, stages, starts and casts
- `links`, `kv`, `pipeline`, `prefill`, `live`: serving while a model loads
"""
