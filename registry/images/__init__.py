"""Model images: packing a checkpoint into one byte range, its manifest, and the content-addressed store."""
