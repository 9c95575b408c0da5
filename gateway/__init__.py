"""The gateway: HTTP, routing, scaling and billing; stateless except for requests in flight.

- `api`: HTTP routes and the ASGI application
- `billing`: request records on their way into the ledger
- `cluster`: the cached state of the cluster and the channels to nodes
- `control`: the control loop, its lease, and operator requests
- `core`: types, errors and settings shared by all packages
- `dispatch`: admission, fairness and routing of calls
- `fakes`: fakes of nodes and channels for tests
- `http`: server, limits, draining and metrics
- `inference`: tokenisation, chat templates and pre-processing
- `live`: serving while a model is still loading
- `planning`: pure decisions on scaling, placement, casts and host copies
- `requests`: the life of one request behind its route
- `schemas`: request and response types and the OpenAPI document
- `tenants`: authentication, quotas and concurrency leases
- `ui`: the console's files
- `watch`: what watchers of the cluster are shown, and its changes
"""
