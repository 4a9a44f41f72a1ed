"""One stage of a plain module: the tensors that it owns, stand-ins for the others, and its forward."""
