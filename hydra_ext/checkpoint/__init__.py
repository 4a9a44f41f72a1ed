"""Checkpoints that survive a crash at any moment: safetensors files and a manifest, without pickle."""
