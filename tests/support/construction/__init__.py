"""Models that are built in parts, and the memory that this takes."""
