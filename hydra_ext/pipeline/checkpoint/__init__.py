"""Checkpoints of a pipeline: what each rank holds, how all of it is saved, and how a run goes on."""
