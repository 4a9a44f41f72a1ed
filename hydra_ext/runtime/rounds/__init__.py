"""Rounds: several microbatches pass each block before the next block is fetched.

Layers, lowest first: :mod:`fibers` (threads that take turns), :mod:`isolation` (what of the process belongs to one
microbatch), :mod:`recompute` (blocks whose activations are made again), :mod:`executor` (one round), :mod:`step`
(a whole training step).
"""
