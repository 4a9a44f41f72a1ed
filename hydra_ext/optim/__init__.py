"""Optimizers that update host parameters in one native pass, and clipping by the same norm that the engine uses."""

from hydra_ext.optim.adam import Adam, AdamW
from hydra_ext.optim.clip import clip_grad_norm_
from hydra_ext.optim.sgd import SGD

__all__ = ["Adam", "AdamW", "SGD", "clip_grad_norm_"]
