"""Loading images into the arena or host memory, from casts, peers or the store.

- `arena_load`: loads into the arena itself
- `arena_writer`: images that arrive in their place in the arena
- `arrival`: images as their users see them, complete or loading
- `attach`: images given to engines in other processes, as they arrive
- `cast_fetch`: this node's part in a cast
- `disk_cache`: images on a disk of this host
- `disk_writer`: background copies of verified images to that disk
- `engine_images`: which image an engine asks for, and who has it
- `fetch_order`: the sources of a load, one after the other
- `fetch`: sources that fill a partial image
- `image_checks`: whole images against their SHA-256
- `image_copies`: whole images on this node, for background work that reads them
- `loader`: one load per image, shared by all waiting starts
- `origins`: where files came from, and what is distrusted after a forged one
- `partial_image`: an image being filled: verified units and their readers
- `progress`: progress of a load
- `published`: images served to other nodes
- `sources`: the peers to load an image from
- `starts_first`: the precedence of starts over background work
- `store_access`: access to the cluster's blob store
- `transports`: the node's transports
- `unit_writer`: the seam to the memory in which units arrive
"""
