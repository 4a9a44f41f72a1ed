"""What a computation reads and leaves behind besides its tensors, as it was at one moment."""
