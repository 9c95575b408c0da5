"""Serving regions of memory to peers.

- `bitfield_source`: bitfields of served regions
- `exporter_registry`: exporters by kind
- `port_arbiter`: the order of payloads at a port
- `region`: a region that is being filled
- `region_server`: the server
- `region_table`: published regions and their leases
- `server_link`: the serving end of a link
- `subscribers`: callbacks on change
"""
