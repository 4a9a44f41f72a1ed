"""Models to cut into stages, and stages of them in one process."""
