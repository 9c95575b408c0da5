"""Pure decisions: scaling, placement, casts and host copies.

- `actions`: what the controller executes
- `arena_space`: where starts find arena space, and instances to stop for more of it
- `cast_forecast`: when a cast's first targets are complete
- `cast_nodes`: the sources and targets of a delivery
- `cast_planner`: which starts become one cast, and its plan
- `cast_publisher`: publishes cast records
- `debounce`: debouncing of growing demand
- `demand_sum`: the load of all gateways together
- `group_starts`: starts of groups, and instances to stop for one
- `groups`: which nodes share an image that fits none of them, and which layers each has
- `image_owners`: which host owns the pinned copy of each image
- `image_sources`: sources of each image, and hosts of new copies
- `link_peers`: links that nodes open to each other when they join
- `load_target`: scaling by tokens and seen capacity
- `loads`: loads of function versions
- `node_demands`: how many nodes are lacking, and how many are not needed
- `outlook`: seen capacities, and when instances would be ready
- `placement`: nodes of starts, instances to stop
- `plan`: settings and outcome of a planning step
- `planner`: scaling, placement and redeploys as one step
- `policy`: scaling policies, and the one by concurrent calls
- `recent`: averages of recent durations
- `replicator`: host copies to make and to drop
- `roles`: which instances of a disaggregated function run prompts, and which continue calls
- `serving_traffic`: the directions in which serving uses the links of nodes
- `starts`: the starts of a planning step, and those in progress
- `work`: work in tokens, seen capacity, and how long work waits
"""
