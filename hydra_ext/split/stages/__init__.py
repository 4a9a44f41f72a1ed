"""One stage of a plain module: what it owns, what stands in for the rest, and how its forward runs."""
