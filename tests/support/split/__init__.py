"""Models to cut into stages, and their stages in one process."""
