"""Models that are built in parts, and what that takes."""
