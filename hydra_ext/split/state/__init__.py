"""What a forward reads and leaves besides tensors: attributes, containers, plain values, generators."""
