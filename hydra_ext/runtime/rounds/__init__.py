"""Rounds: several microbatches pass each block before the next block is fetched.

Layers, lowest first: :mod:`fibers` (threads that take turns), :mod:`isolation` (process state of each microbatch),
:mod:`recompute` (blocks whose activations are recomputed), :mod:`executor` (one round), :mod:`step` (a whole training
step).
"""
