"""Checkpoints that survive a crash at any moment: safetensors files and a manifest, no pickle."""

from hydra_ext.checkpoint.loading import Loaded, load_model

__all__ = ["Loaded", "load_model"]
