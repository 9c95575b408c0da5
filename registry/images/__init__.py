"""Model images: packing of a checkpoint into one file, its manifest, and the content-addressed store.

- `adapters`: LoRA adapters among a function's files
- `architectures`: the architectures: tasks, and the tensors of encoders
- `assets`: the small files of a model
- `codec`: manifests as JSON
- `digests`: digests, marker file and running hashes, shared by the stores
- `dtype_names`, `dtypes`: element types and their conversion
- `fsspec_store`: a blob store behind an fsspec URL
- `layer_tensors`: the tensor names of each family of encoders, in execution order
- `layout`: the header of an image, and the offsets of its tensors
- `local_reader`, `local_store`: a blob store in a local folder
- `manifest`: the manifest of an image
- `order`: the execution order of a decoder's tensors, from their names
- `pack`: hashing of a planned image, and writing it to a folder
- `page_cache`: the residency of a file in the page cache
- `plan`: a virtual image over checkpoint files
- `remote`: checkpoints in object stores and on hubs, read in place
- `safetensors_file`: bounded readers of safetensors headers
- `source`: the folder of a checkpoint, local or from a hub
- `store`: the seam of blob stores, and `open_store`
- `verify`: unit checksums
"""
