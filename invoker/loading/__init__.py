"""Loading images into host memory, from casts, peers or the store.

- `cast_fetch`: this node's part in a cast
- `fetch`: sources that fill a partial image
- `image_checks`: whole images against their SHA-256
- `loader`: one load per image, shared by all waiting starts
- `partial_image`: an image being filled: verified units and their readers
- `published`: images served to other nodes
- `sources`: the peers to load an image from
- `store_access`: access to the cluster's blob store
- `transports`: the node's transports
"""
