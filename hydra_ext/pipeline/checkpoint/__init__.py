"""Checkpoints of a pipeline: which rank holds which tensors, saving them, and resuming from them."""
