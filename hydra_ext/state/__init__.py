"""The state that a computation reads and writes besides its arguments: snapshots, copies, comparisons."""
