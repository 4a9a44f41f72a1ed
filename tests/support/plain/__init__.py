"""Plain models trained by pipelines of several processes."""
