"""What autograd saves for backward: what becomes of it, and where it is kept."""
