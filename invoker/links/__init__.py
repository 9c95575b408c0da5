"""Links between stages of pipelines, and KV transfers over them.

- `export_buffer`: K and V exported by stages, kept until another node fetches them
- `frames`: frames between stages
- `framing`: the frame format and reader of all links
- `kv_link`: one KV slice over a link
- `link`: dialing, authentication and stage keys
- `listener`: accepts links to this node's stages
- `wire`: non-blocking send and receive for a stage's two links
"""
