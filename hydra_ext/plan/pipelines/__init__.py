"""Plans of pipelines: how many lines of ranks, where they cut the model, and how they pass microbatches."""
