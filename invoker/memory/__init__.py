"""Accelerator and host memory.

- `allocator`: first-fit allocator of one address range
- `arena`: preallocated accelerator memory, and copies into it
- `cuda_arena`: the arena on a CUDA device
- `device_driver`: the seam to a device that the CPU cannot address
- `huge_pages`: huge pages for files in memory
- `mappings`: page population and free-memory estimates
- `pinned_pool`: page-locked host memory, lent in ranges
- `staged_arena`: arenas that are filled and read through such memory
"""
