"""How many workers each stage has: what is seen of a pipeline, what is done about it, and a simulated pipeline."""
