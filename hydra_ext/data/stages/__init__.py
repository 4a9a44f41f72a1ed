"""Stages of a pipeline, as nodes of torchdata."""
