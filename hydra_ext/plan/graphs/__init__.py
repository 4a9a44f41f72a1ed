"""Stages of a graph of layers: equally many layers in each, or any."""
