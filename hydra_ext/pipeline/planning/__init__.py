"""How a pipeline is laid out over its ranks: as it was given, or as a plan from measured times has it."""
