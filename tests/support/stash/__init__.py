"""Losses and gradients with and without a stash."""
