"""Model images in shared memory, one copy for all invokers of a host.

- `buffer_pool`: pre-faulted memory for the next image
- `folder`: files and locks of the tier
- `model_folders`: folders from which other engines load an image
- `mapping`: complete images mapped into this process
- `image_writer`: the file of an image being loaded
- `staging`: huge-page buffers for direct disk reads
- `tier`: lookup, admission and eviction
"""
