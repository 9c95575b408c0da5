"""Accelerator and host memory.

- `allocator`: first-fit allocator of one address range
- `arena`: preallocated accelerator memory, and copies into it
- `cuda_arena`: the arena on a CUDA device
- `huge_pages`: huge pages for files in memory
- `mappings`: page population and free-memory estimates
"""
