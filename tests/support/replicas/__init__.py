"""What ranks do in tests of data parallel training."""
