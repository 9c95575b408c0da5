"""The processes of `hypercast up`.

- `announce`: the message once all is ready
- `backoff`: delays before restarts
- `children`: child processes that are restarted
- `leftovers`: shared memory of killed platforms
- `logtail`: last lines of a log file
- `orphans`: adopted processes
- `ports`: ports to listen on
- `rotation`: log files that do not grow without bound
- `run_file`: the running platform of a data directory
- `settings`: the settings of `up`
- `supervisor`: start, restart and stop of all parts
- `zygote`: fork of nodes and gateways
"""
