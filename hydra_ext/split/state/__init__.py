"""State besides tensors that a forward reads and leaves: attributes, containers, plain values, generators."""
