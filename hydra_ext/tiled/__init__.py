"""Trains convolutional networks on one image far larger than the device: exact strips, no approximation."""

from __future__ import annotations

from hydra_ext.tiled.pixels import image
from hydra_ext.tiled.run import TiledReport, TiledRun
from hydra_ext.tiled.strips import strips

__all__ = ["TiledReport", "TiledRun", "image", "strips"]
