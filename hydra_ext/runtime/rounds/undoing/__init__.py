"""What a round is undone to: contents of modules, buffers, what holds them, and where they are read."""
