"""One node's part in a cast; a pull is a cast with one target.

- `block_reads`: reads and checks of blocks
- `have_requests`: HAVE requests without a reply
- `hooks`: hooks of the caller for each block
- `limits`: time limits
- `links`: links to the other nodes
- `pending_pulls`: pulls that have not ended
- `pull`: a cast with one target
- `pull_log`: durations for reports
- `record`: what all nodes know of a cast
- `region_watcher`: connections for watches of any peer
- `replanner`: plans around slow nodes
- `report`: results and faults
- `runner`: a session driven by links, watches and clock
- `session`: the state machine
- `session_actions`: its actions
- `session_peers`: its peers
- `session_plan`: its planned sources
- `session_settings`: its limits
- `spec`: a cast as its nodes run it
- `watch_link`: watches of one peer's regions
- `watches`: all watches of a cast
"""
