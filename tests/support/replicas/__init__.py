"""The work of ranks in tests of data parallel training."""
