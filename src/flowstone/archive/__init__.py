"""A log that is received and kept: segments, index, images, manifest; and spools, which keep rows until read."""
