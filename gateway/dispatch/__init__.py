"""The path of a call from the request queue to a replica.

- `admission`: bounded request queues, one per function version
- `call_averages`: service times and outputs of each version
- `call_mover`: moves of running calls from pipelines to promoted members, and from instances that stop
- `demand`: load reports of this gateway
- `dispatcher`: admission, queueing and assignment
- `execution`: one call on its replicas, with failover
- `fairness`: start-time fair queueing between tenants
- `movable_calls`: the running generations by replica
- `node_requests`: requests to nodes by which running calls move
- `outcomes`: how tries end, and how failures are reported
- `progress`: the progress of starts that calls wait for
- `replica_calls`: the work of each replica on a call, and its usage
- `router`: the choice of a replica, and its slots
- `targets`: shortest-completion-time routing beside pipelines
- `tokenizers`: the tokenizers that nodes need for grammars
- `unservable`: waiting calls that no start can serve
"""
