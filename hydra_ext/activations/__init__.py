"""What autograd saves for backward: who keeps it, and where."""
