"""Optimizers that update host parameters in one native pass, clipping by the engine's norm, and optimizers for late
gradients."""

from hydra_ext.optim.adam import Adam, AdamW
from hydra_ext.optim.clip import clip_grad_norm_
from hydra_ext.optim.delayed import DelayCorrectedAdamW, NAdamW
from hydra_ext.optim.muon import Muon
from hydra_ext.optim.sgd import SGD

__all__ = ["Adam", "AdamW", "SGD", "clip_grad_norm_", "DelayCorrectedAdamW", "Muon", "NAdamW"]
